from jaxserve.server.proto.jaxserve.v1 import model_pb2 as _model_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetLoadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetLoadResponse(_message.Message):
    __slots__ = ("num_running", "num_waiting", "kv_cache_usage", "num_in_flight", "is_draining", "groups", "ranks")
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_USAGE_FIELD_NUMBER: _ClassVar[int]
    NUM_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    IS_DRAINING_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    num_running: int
    num_waiting: int
    kv_cache_usage: float
    num_in_flight: int
    is_draining: bool
    groups: _containers.RepeatedCompositeFieldContainer[GroupLoad]
    ranks: _containers.RepeatedCompositeFieldContainer[RankProgress]
    def __init__(self, num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., kv_cache_usage: _Optional[float] = ..., num_in_flight: _Optional[int] = ..., is_draining: _Optional[bool] = ..., groups: _Optional[_Iterable[_Union[GroupLoad, _Mapping]]] = ..., ranks: _Optional[_Iterable[_Union[RankProgress, _Mapping]]] = ...) -> None: ...

class RankProgress(_message.Message):
    __slots__ = ("engine", "rank", "host", "num_steps", "num_sent_bytes")
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    engine: int
    rank: int
    host: str
    num_steps: int
    num_sent_bytes: int
    def __init__(self, engine: _Optional[int] = ..., rank: _Optional[int] = ..., host: _Optional[str] = ..., num_steps: _Optional[int] = ..., num_sent_bytes: _Optional[int] = ...) -> None: ...

class GroupLoad(_message.Message):
    __slots__ = ("is_up", "num_running", "num_waiting", "kv_cache_usage")
    IS_UP_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_USAGE_FIELD_NUMBER: _ClassVar[int]
    is_up: bool
    num_running: int
    num_waiting: int
    kv_cache_usage: float
    def __init__(self, is_up: _Optional[bool] = ..., num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., kv_cache_usage: _Optional[float] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("timeout_s",)
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    timeout_s: float
    def __init__(self, timeout_s: _Optional[float] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResetPrefixCacheRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResetPrefixCacheResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StartProfileRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StartProfileResponse(_message.Message):
    __slots__ = ("directory",)
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    directory: str
    def __init__(self, directory: _Optional[str] = ...) -> None: ...

class StopProfileRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StopProfileResponse(_message.Message):
    __slots__ = ("directory",)
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    directory: str
    def __init__(self, directory: _Optional[str] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("request_ids",)
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, request_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ("aborted_request_ids",)
    ABORTED_REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    aborted_request_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, aborted_request_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class ReshardRequest(_message.Message):
    __slots__ = ("mesh", "layout")
    MESH_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    mesh: str
    layout: str
    def __init__(self, mesh: _Optional[str] = ..., layout: _Optional[str] = ...) -> None: ...

class ReshardResponse(_message.Message):
    __slots__ = ("from_mesh", "to_mesh", "from_layout", "to_layout", "num_programs", "compile_s", "pause_s", "drain_s", "move_s", "warm_up_s", "weight_bytes", "page_bytes", "num_pages", "num_cached_pages", "num_requeued", "num_recomputed_tokens", "num_states", "num_cached_states")
    FROM_MESH_FIELD_NUMBER: _ClassVar[int]
    TO_MESH_FIELD_NUMBER: _ClassVar[int]
    FROM_LAYOUT_FIELD_NUMBER: _ClassVar[int]
    TO_LAYOUT_FIELD_NUMBER: _ClassVar[int]
    NUM_PROGRAMS_FIELD_NUMBER: _ClassVar[int]
    COMPILE_S_FIELD_NUMBER: _ClassVar[int]
    PAUSE_S_FIELD_NUMBER: _ClassVar[int]
    DRAIN_S_FIELD_NUMBER: _ClassVar[int]
    MOVE_S_FIELD_NUMBER: _ClassVar[int]
    WARM_UP_S_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    PAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_PAGES_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUEUED_FIELD_NUMBER: _ClassVar[int]
    NUM_RECOMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_STATES_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_STATES_FIELD_NUMBER: _ClassVar[int]
    from_mesh: _containers.RepeatedCompositeFieldContainer[_model_pb2.MeshAxis]
    to_mesh: _containers.RepeatedCompositeFieldContainer[_model_pb2.MeshAxis]
    from_layout: str
    to_layout: str
    num_programs: int
    compile_s: float
    pause_s: float
    drain_s: float
    move_s: float
    warm_up_s: float
    weight_bytes: int
    page_bytes: int
    num_pages: int
    num_cached_pages: int
    num_requeued: int
    num_recomputed_tokens: int
    num_states: int
    num_cached_states: int
    def __init__(self, from_mesh: _Optional[_Iterable[_Union[_model_pb2.MeshAxis, _Mapping]]] = ..., to_mesh: _Optional[_Iterable[_Union[_model_pb2.MeshAxis, _Mapping]]] = ..., from_layout: _Optional[str] = ..., to_layout: _Optional[str] = ..., num_programs: _Optional[int] = ..., compile_s: _Optional[float] = ..., pause_s: _Optional[float] = ..., drain_s: _Optional[float] = ..., move_s: _Optional[float] = ..., warm_up_s: _Optional[float] = ..., weight_bytes: _Optional[int] = ..., page_bytes: _Optional[int] = ..., num_pages: _Optional[int] = ..., num_cached_pages: _Optional[int] = ..., num_requeued: _Optional[int] = ..., num_recomputed_tokens: _Optional[int] = ..., num_states: _Optional[int] = ..., num_cached_states: _Optional[int] = ...) -> None: ...
