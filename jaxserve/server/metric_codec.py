"""Metrics as JSON values and back."""

from collections.abc import Iterable
from typing import Any

from jaxserve.metric_types import Counter, Gauge, Histogram, Metric


def metrics_to_json(metrics: Iterable[Metric]) -> list[dict[str, Any]]:
    """One object a metric."""
    return [{"kind": metric.kind, **vars(metric)} for metric in metrics]


def metrics_from_json(values: Iterable[dict[str, Any]]) -> list[Metric]:
    """What ``metrics_to_json`` was given."""
    classes: dict[str, type[Metric]] = {cls.kind: cls for cls in (Counter, Gauge, Histogram)}
    return [classes[value["kind"]](**{name: value[name] for name in value if name != "kind"}) for value in values]
