"""What an engine process does with the frames that the front end sends it."""

import json
import logging
import threading

from jaxserve.config import EngineConfig
from jaxserve.engine.engine_thread import EngineThread
from jaxserve.engine.startup import StartedEngine
from jaxserve.errors import JaxserveError
from jaxserve.server.engine_frames import error_to_proto
from jaxserve.server.engine_process.outbox import Outbox
from jaxserve.server.engine_process.outbox_stream import OutboxStream
from jaxserve.server.engine_process.preparation import Preparation
from jaxserve.server.engine_process.queries import Answer, Queries, answer_error
from jaxserve.server.engine_process.queue_limits import Place, QueueLimits
from jaxserve.server.engine_process.ready import num_places
from jaxserve.server.engine_process.renderers import Renderers
from jaxserve.server.proto.jaxserve.internal.v1 import engine_pb2
from jaxserve.server.settings import QUEUED_CONTEXTS, QUEUED_SEQS

logger = logging.getLogger(__name__)


class Serving:
    """Lets requests run, ends them, and answers questions. One thread hands it all frames.

    Args:
        started: The engine.
        config: Its settings.
        start: The front end's.
        thread: Runs the engine.
        outbox: To the front end.
        renderers: Make prompts of conversations.
    """

    def __init__(
        self,
        started: StartedEngine,
        config: EngineConfig,
        start: engine_pb2.Start,
        thread: EngineThread,
        outbox: Outbox,
        renderers: Renderers,
    ):
        places = num_places(started)
        self._thread = thread
        self._outbox = outbox
        self._limits = QueueLimits(
            places,
            start.max_num_queued_reqs or QUEUED_SEQS * places,
            start.max_num_queued_tokens or QUEUED_CONTEXTS * started.plan.max_model_len,
        )
        content_format = start.chat_template_content_format or "auto"
        self._preparation = Preparation(started, thread, self._limits, renderers, config.chat_template, content_format)
        self._queries = Queries(started, thread, self._preparation, self._abort)
        self._requests: dict[int, tuple[OutboxStream, Place]] = {}
        self._lock = threading.Lock()  # of the dict

    def handle(self, frame: engine_pb2.ToEngine) -> None:
        """Does what a frame says; what it is at fault for is logged, or told who asked."""
        kind = frame.WhichOneof("frame")
        if kind == "submit":
            self._submit(frame.submit)
        elif kind == "cancel":
            for number in frame.cancel.ids:
                self._cancel(number)
        elif kind == "query":
            self._ask(frame.query)
        elif kind == "stop":
            self.stop(frame.stop.drain_s)
        else:
            logger.error("a frame of kind %s is dropped", kind)

    def stop(self, drain_s: float) -> None:
        """Ends the engine's thread, which ends the process; requests may go on for so long. Does not wait."""
        threading.Thread(target=self._thread.stop, args=(drain_s,), daemon=True).start()

    def close(self) -> None:
        """Ends what prepares requests. Does not wait."""
        self._preparation.close()

    def _submit(self, message: engine_pb2.Submit) -> None:
        stream = OutboxStream(self._outbox, message.id, message.request_id, self._ended)
        try:
            is_alone = message.pooling or not message.sampling_params.HasField("n")
            place = self._limits.enter(1 if is_alone else max(message.sampling_params.n, 1))
        except JaxserveError as error:
            stream.refuse(error)
            return
        with self._lock:
            self._requests[message.id] = stream, place
        self._preparation.begin(stream, message, place)

    def _cancel(self, number: int) -> None:
        with self._lock:
            found = self._requests.get(number)
        if found is not None:
            found[0].silence()

    def _ended(self, stream: OutboxStream) -> None:
        """Nothing more is said of a request: its place is free, and what may still run of it ends."""
        with self._lock:
            found = self._requests.pop(stream.number, None)
        if found is not None:
            self._limits.leave(found[1])
        if stream.is_silent:
            self._thread.drop(stream)

    def _abort(self, request_ids: list[str]) -> Answer:
        wanted = set(request_ids)
        with self._lock:
            streams = [stream for stream, _ in self._requests.values() if stream.request_id in wanted]
        for stream in streams:
            stream.is_cancelled = True
        found = [stream.request_id for stream in streams]
        answer = Answer()
        self._thread.abort(found).add_done_callback(lambda _: answer.set_result(found))
        return answer

    def _ask(self, query: engine_pb2.Query) -> None:
        def tell(answer: Answer) -> None:
            message = engine_pb2.Answer(id=query.id)
            try:
                message.value_json = json.dumps(answer.result())
            except BaseException as error:  # whatever it is, who asked must not wait for ever
                message.error.CopyFrom(error_to_proto(answer_error(error)))
            self._outbox.send(answer=message)

        self._queries.ask(query.method, query.arguments_json).add_done_callback(tell)
