"""The examples of ``sharding/README.md``: each function computes one from plans and returns it as Markdown."""

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jaxserve
from jaxserve.lab.hardware import LINKS
from jaxserve.lab.links import collective_seconds, one_shot_seconds, ring_seconds
from jaxserve.lab.plan.planned import Plan
from jaxserve.lab.records import StepCost
from jaxserve.lab.report import seconds, size
from scripts import predict_steps

MODELS = Path(__file__).parent / "charts" / "sharding_models.json"
DENSE = ("tensor_parallel", "replicated_attention", "sequence_parallel", "split_logits", "context_parallel")
EXPERTS = {
    "tensor_parallel": "tensor=8",
    "expert_parallel": "tensor=8",
    "expert_all_reduce": "expert=8",
    "expert_gather": "expert=8",
    "expert_all_to_all": "expert=8",
}
HOSTS = ("tensor=16", "stage=2,tensor=8", "data=2,tensor=8", "stage=16")


class Plans:
    """Plans of the page's models, each made once.

    Args:
        folder: Folder to which their ``config.json`` are written.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._made: dict[Any, Plan] = {}
        for name, config in json.loads(MODELS.read_text()).items():
            (folder / name).mkdir()
            (folder / name / "config.json").write_text(json.dumps(config))

    def of(self, model: str, mesh: str, layout: str = "tensor_parallel", *, device: str, **settings: Any) -> Plan:
        """Return a plan for steps of at most 2,048 tokens and 256 sequences, and requests of at most 8,192 tokens."""
        key = model, mesh, layout, device, *settings.items()
        if key not in self._made:
            given = {"max_model_len": 8192, "num_seqs": 256, "max_num_batched_tokens": 2048, **settings}
            self._made[key] = jaxserve.plan(str(self._folder / model), mesh, layout, device, **given)
        return self._made[key]

    def on_one_card(self, num_devices: int) -> Plan:
        """Return the plan of Qwen2.5-14B on cards of 24 GiB, for 32 sequences."""
        return self.of("Qwen2.5-14B", f"tensor={num_devices}", device="rtx4090", num_seqs=32)


def table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def exchanged(step: StepCost) -> int:
    """Return the bytes of the results of a step's collectives on a device."""
    return sum(each.total_bytes for each in step.communication)


def _count(step: StepCost) -> int:
    return sum(each.times for each in step.communication)


def weights(plans: Plans) -> str:
    """Return the weights of a dense model by hand and as planned, and the KV tokens left room for."""
    config = json.loads(MODELS.read_text())["Qwen2.5-14B"]
    embed, heads, kv_heads = (
        config[f"{name}"] for name in ("hidden_size", "num_attention_heads", "num_key_value_heads")
    )
    ffn, vocab, layers = (config[name] for name in ("intermediate_size", "vocab_size", "num_hidden_layers"))
    head = embed // heads
    qkv, out, mlp = (heads + 2 * kv_heads) * head * embed, embed * heads * head, 3 * ffn * embed
    total = layers * (qkv + out + mlp) + 2 * vocab * embed
    found = {count: plans.on_one_card(count) for count in (1, 2, 4, 8)}
    rows = [
        (str(count), size(plan.fullest.weights), size(plan.kv_bytes_per_token), _room(plan), _times(plan, found[2]))
        for count, plan in found.items()
    ]
    return (
        f"Qwen2.5-14B: D = {embed:,}, N = {heads}, K = {kv_heads}, H = {head}, F = {ffn:,}, V = {vocab:,}, "
        f"L = {layers}.\n\n"
        f"- A layer's `Wqkv` has (N + 2K) H D = {qkv:,} numbers, `Wo` N H D = {out:,}, the MLP 3 F D = {mlp:,}.\n"
        f"- L layers, the embedding and the head (V D each) have {total:,}; with 2 bytes each {size(2 * total)}.\n"
        f"- The plan counts {size(found[1].fullest.weights)}, with biases and norms.\n\n"
        + table(["RTX 4090 cards", "weights", "KV per token", "tokens of KV cache", "to 2 cards"], rows)
    )


def _room(plan: Plan) -> str:
    return f"{plan.kv_tokens:,}" if plan.kv_tokens else "none, weights too large"


def _times(plan: Plan, other: Plan) -> str:
    return f"{plan.kv_tokens / other.kv_tokens:.1f}×" if plan.kv_tokens else "-"


def kv(plans: Plans) -> str:
    """Return the KV bytes per token of three models, by tokens and by heads."""
    rows = []
    for model, num_devices, layouts in (
        ("Qwen2.5-14B", 4, ("tensor_parallel", "replicated_attention")),
        ("Llama-3.1-70B", 16, ("tensor_parallel", "context_parallel")),
        ("DeepSeek-R1", 16, ("tensor_parallel", "context_parallel")),
    ):
        for layout in layouts:
            plan = plans.of(model, f"tensor={num_devices}", layout, device="h200")
            per = plan.kv_bytes_per_token
            share = f"1/{round(plan.model_kv_bytes_per_token / per)}"
            total = size(plan.model_kv_bytes_per_token)
            rows.append((model, total, str(num_devices), layout, size(per), share, f"{plan.kv_tokens:,}"))
    names = ["model", "KV per token", "devices", "layout", "of a device", "share", "tokens that fit, all H200"]
    return table(names, rows)


def all_reduce(plans: Plans) -> str:
    """Return the collectives of a decode and a prefill step, and the time of one all-reduce over several links."""
    plan = plans.on_one_card(2)
    steps = {"decode, 1 sequence": plan.decode_of(1), "decode, 32": plan.decode_of(32), "prefill": plan.prefill}
    rows = []
    for name, step in steps.items():
        (layers,) = (each for each in step.communication if each.part == "layers")
        total, share = seconds(step.communication_s), step.communication_s / step.latency_s
        each, times = size(layers.num_bytes), str(layers.times)
        rows.append((name, f"{step.rows:,}", times, each, size(layers.total_bytes), total, f"{share:.0%}"))
    names = ["step", "tokens", "all-reduces", "each", "all", "communication", "of the step"]
    return f"{table(names, rows)}\n\n{_links()}"


def _links() -> str:
    rows = []
    for name in ("nvlink-h200", "infiniband-ndr", "pcie4"):
        link = LINKS[name]
        for num_bytes in (16 << 10, 32 << 20):
            given = ("all-reduce", num_bytes, 8, link)
            ring, one_shot = seconds(ring_seconds(*given)), seconds(one_shot_seconds(*given))
            rate, latency = f"{link.rate / 1e9:.1f} GB/s", seconds(link.latency_s)
            rows.append((name, rate, latency, size(num_bytes), ring, one_shot, seconds(collective_seconds(*given))))
    return table(["link", "rate", "latency", "bytes, 8 devices", "ring", "one-shot", "the faster"], rows)


def hosts(plans: Plans) -> str:
    """Return the steps of a large dense model on two hosts of eight devices, and on four cards without NVLink."""
    cases = [("Llama-3.1-70B", "h100", mesh, {}) for mesh in HOSTS]
    cases += [("Qwen2.5-14B", "rtx4090", mesh, {"num_seqs": 64}) for mesh in ("tensor=4", "stage=4")]
    rows = []
    for model, device, mesh, settings in cases:
        plan = plans.of(model, mesh, device=device, **settings)
        one, many, prefill = plan.decode_of(1), plan.decode_of(64), plan.prefill
        latency = f"{seconds(one.latency_s)} ({seconds(one.communication_s)})"
        first = f"{seconds(prefill.latency_s)} ({seconds(prefill.communication_s)})"
        rates = f"{many.tokens_per_s:,.0f}", f"{prefill.tokens_per_s:,.0f}"
        rows.append((model, f"{plan.num_devices} {device}", f"`{mesh}`", latency, first, *rates))
    names = ["model", "devices", "mesh", "decode step", "prefill step", "decode tokens/s", "prompt tokens/s"]
    return f"{table(names, rows)}\n\n{_in_two_levels(plans.of('Llama-3.1-70B', 'tensor=16', device='h100'))}"


def _in_two_levels(plan: Plan) -> str:
    """Return what it changes to add inside each of two hosts of 8 devices before adding between them."""
    (layers,) = (each for each in plan.prefill.communication if each.part == "layers")
    inside, between, part = plan.device.link, plan.device.host_link, layers.num_bytes // 8
    time_s = ring_seconds("reduce-scatter", part, 8, inside) + ring_seconds("all-gather", layers.num_bytes, 8, inside)
    time_s += ring_seconds("all-reduce", part, 2, between)
    prefill_s = plan.prefill.latency_s - layers.seconds + layers.times * time_s
    return (
        f"One ring of 16 takes {seconds(layers.seconds / layers.times)} for the {size(layers.num_bytes)} of a prefill "
        f"step's all-reduce. To add inside each host, then an eighth of the bytes per device between the two, takes "
        f"{seconds(time_s)}: a prefill step of {seconds(prefill_s)}, {plan.prefill.tokens / prefill_s:,.0f} prompt "
        "tokens/s."
    )


def experts(plans: Plans) -> str:
    """Return the expert weights that a step reads by batch, and the layouts of a mixture of experts."""
    found = {layout: plans.of("Mixtral-8x22B", mesh, layout, device="h200") for layout, mesh in EXPERTS.items()}
    first = found["tensor_parallel"]
    whole = first.fullest.weights
    sizes = (1, 4, 16, 64)
    read = [size(first.decode_of(batch).weight_bytes) for batch in sizes]
    shares = [f"{1 - (1 - 2 / 8) ** batch:.0%}" for batch in sizes]
    used = table(["sequences", *map(str, sizes)], [("experts used per layer", *shares), ("weights read", *read)])
    rows = []
    for layout, plan in found.items():
        one, many = plan.decode_of(1), plan.decode_of(256)
        weights, tokens = size(plan.fullest.weights), f"{plan.kv_tokens:,}" if plan.fits else "does not fit"
        steps = seconds(one.step_s), seconds(many.step_s), seconds(many.communication_s)
        rows.append((f"`{layout}`", f"`{EXPERTS[layout]}`", weights, tokens, str(_count(many)), *steps))
    names = [
        "layout",
        "mesh",
        "weights",
        "KV tokens",
        "collectives",
        "step, 1 sequence",
        "step, 256",
        "of it collectives",
    ]
    return f"{size(whole)} of weights on each of 8 devices:\n\n{used}\n\n{table(names, rows)}"


def layouts(plans: Plans) -> str:
    """Return what each layout of a dense model takes and exchanges."""
    rows = []
    for layout in DENSE:
        plan = plans.of("Qwen2.5-14B", "tensor=4", layout, device="h200")
        step, prefill = plan.decode_of(32), plan.prefill
        memory = size(plan.fullest.weights), size(plan.kv_bytes_per_token), f"{plan.kv_tokens:,}"
        counted = f"{_count(step)}, {size(exchanged(step))}", f"{_count(prefill)}, {size(exchanged(prefill))}"
        rows.append((f"`{layout}`", *memory, *counted, seconds(step.step_s), seconds(prefill.step_s)))
    names = ["layout", "weights", "KV per token", "KV tokens", "decode exchanges", "prefill exchanges"]
    return table([*names, "decode step", "prefill step"], rows)


def predicted(plans: Plans) -> str:
    """How far predictions are from measured steps, in short, and for each mesh and layout."""
    found, steps = predict_steps.read()
    rows = []
    for model, batch in itertools.product(predict_steps.MODELS, predict_steps.BATCH_SIZES):
        own = [step for step in steps if (step.model, step.batch) == (model, batch)]
        error, tau = predict_steps.median_error(own), predict_steps.kendall_tau(own)
        fastest, slowest = (choose(step.measured_s for step in own) for choose in (min, max))
        rows.append(
            [
                model,
                str(batch),
                str(len(own)),
                f"{seconds(fastest)} to {seconds(slowest)}",
                f"{error:.0%}",
                f"{tau:.2f}",
                f"{predict_steps.difference_of_rounds(own):.0%}",
            ]
        )
    names = ["model", "sequences", "meshes and layouts", "measured", "median error", "Kendall's τ", "rounds differ by"]
    machine = f"{found['machine']}, {found['date']}, JAX {found['versions']['jax']}"
    parts = [f"Four virtual devices of {machine}:", table(names, rows)]
    for model in predict_steps.MODELS:
        title = f"<details><summary>Every mesh and layout of the model: {model}</summary>"
        parts += [title, _steps_table([step for step in steps if step.model == model]), "</details>"]
    return "\n\n".join(parts)


def _steps_table(steps: Sequence[predict_steps.Step]) -> str:
    """Return predicted and measured times of each mesh and layout, the fastest of the largest batch first."""
    found = {(step.name, step.batch): step for step in steps}
    sizes = predict_steps.BATCH_SIZES
    names = ["mesh and layout"]
    for size_ in sizes:
        names += [f"predicted, B={size_}", f"measured, B={size_}", "error"]
    rows = []
    for name in sorted({step.name for step in steps}, key=lambda name: found[name, sizes[-1]].measured_s):
        row = [name]
        for step in (found[name, size_] for size_ in sizes):
            row += [seconds(step.predicted_s), seconds(step.measured_s), f"{step.error:+.0%}"]
        rows.append(row)
    return table(names, rows)


SECTIONS: Mapping[str, Callable[[Plans], str]] = {
    "weights": weights,
    "kv": kv,
    "all-reduce": all_reduce,
    "hosts": hosts,
    "experts": experts,
    "layouts": layouts,
    "predicted": predicted,
}
"""The examples, by the names of their markers in the page."""
