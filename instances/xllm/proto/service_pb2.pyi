from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class InstanceType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DEFAULT: _ClassVar[InstanceType]
    PREFILL: _ClassVar[InstanceType]
    DECODE: _ClassVar[InstanceType]
    MIX: _ClassVar[InstanceType]
DEFAULT: InstanceType
PREFILL: InstanceType
DECODE: InstanceType
MIX: InstanceType

class InstanceMetaInfo(_message.Message):
    __slots__ = ("name", "rpc_address", "type", "cluster_ids", "k_cache_ids", "v_cache_ids", "dp_size", "addrs", "device_ips", "ports", "incarnation_id", "register_ts_ms", "kv_split_size")
    NAME_FIELD_NUMBER: _ClassVar[int]
    RPC_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_IDS_FIELD_NUMBER: _ClassVar[int]
    K_CACHE_IDS_FIELD_NUMBER: _ClassVar[int]
    V_CACHE_IDS_FIELD_NUMBER: _ClassVar[int]
    DP_SIZE_FIELD_NUMBER: _ClassVar[int]
    ADDRS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_IPS_FIELD_NUMBER: _ClassVar[int]
    PORTS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_ID_FIELD_NUMBER: _ClassVar[int]
    REGISTER_TS_MS_FIELD_NUMBER: _ClassVar[int]
    KV_SPLIT_SIZE_FIELD_NUMBER: _ClassVar[int]
    name: str
    rpc_address: str
    type: InstanceType
    cluster_ids: _containers.RepeatedScalarFieldContainer[int]
    k_cache_ids: _containers.RepeatedScalarFieldContainer[int]
    v_cache_ids: _containers.RepeatedScalarFieldContainer[int]
    dp_size: int
    addrs: _containers.RepeatedScalarFieldContainer[str]
    device_ips: _containers.RepeatedScalarFieldContainer[str]
    ports: _containers.RepeatedScalarFieldContainer[int]
    incarnation_id: str
    register_ts_ms: int
    kv_split_size: int
    def __init__(self, name: _Optional[str] = ..., rpc_address: _Optional[str] = ..., type: _Optional[_Union[InstanceType, str]] = ..., cluster_ids: _Optional[_Iterable[int]] = ..., k_cache_ids: _Optional[_Iterable[int]] = ..., v_cache_ids: _Optional[_Iterable[int]] = ..., dp_size: _Optional[int] = ..., addrs: _Optional[_Iterable[str]] = ..., device_ips: _Optional[_Iterable[str]] = ..., ports: _Optional[_Iterable[int]] = ..., incarnation_id: _Optional[str] = ..., register_ts_ms: _Optional[int] = ..., kv_split_size: _Optional[int] = ...) -> None: ...

class KvCacheEvent(_message.Message):
    __slots__ = ("stored_cache", "removed_cache", "offload_cache")
    STORED_CACHE_FIELD_NUMBER: _ClassVar[int]
    REMOVED_CACHE_FIELD_NUMBER: _ClassVar[int]
    OFFLOAD_CACHE_FIELD_NUMBER: _ClassVar[int]
    stored_cache: _containers.RepeatedScalarFieldContainer[bytes]
    removed_cache: _containers.RepeatedScalarFieldContainer[bytes]
    offload_cache: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, stored_cache: _Optional[_Iterable[bytes]] = ..., removed_cache: _Optional[_Iterable[bytes]] = ..., offload_cache: _Optional[_Iterable[bytes]] = ...) -> None: ...

class LoadMetrics(_message.Message):
    __slots__ = ("waiting_requests_num", "gpu_cache_usage_perc")
    WAITING_REQUESTS_NUM_FIELD_NUMBER: _ClassVar[int]
    GPU_CACHE_USAGE_PERC_FIELD_NUMBER: _ClassVar[int]
    waiting_requests_num: int
    gpu_cache_usage_perc: float
    def __init__(self, waiting_requests_num: _Optional[int] = ..., gpu_cache_usage_perc: _Optional[float] = ...) -> None: ...

class LatencyMetrics(_message.Message):
    __slots__ = ("recent_max_ttft", "recent_max_tbt")
    RECENT_MAX_TTFT_FIELD_NUMBER: _ClassVar[int]
    RECENT_MAX_TBT_FIELD_NUMBER: _ClassVar[int]
    recent_max_ttft: int
    recent_max_tbt: int
    def __init__(self, recent_max_ttft: _Optional[int] = ..., recent_max_tbt: _Optional[int] = ...) -> None: ...

class WeightSegment(_message.Message):
    __slots__ = ("offset", "size")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    offset: int
    size: int
    def __init__(self, offset: _Optional[int] = ..., size: _Optional[int] = ...) -> None: ...

class WeightSegments(_message.Message):
    __slots__ = ("segments",)
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    segments: _containers.RepeatedCompositeFieldContainer[WeightSegment]
    def __init__(self, segments: _Optional[_Iterable[_Union[WeightSegment, _Mapping]]] = ...) -> None: ...

class XTensorHeartbeatInfo(_message.Message):
    __slots__ = ("worker_free_phy_pages", "model_weight_segments")
    class ModelWeightSegmentsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: WeightSegments
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[WeightSegments, _Mapping]] = ...) -> None: ...
    WORKER_FREE_PHY_PAGES_FIELD_NUMBER: _ClassVar[int]
    MODEL_WEIGHT_SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    worker_free_phy_pages: _containers.RepeatedScalarFieldContainer[int]
    model_weight_segments: _containers.MessageMap[str, WeightSegments]
    def __init__(self, worker_free_phy_pages: _Optional[_Iterable[int]] = ..., model_weight_segments: _Optional[_Mapping[str, WeightSegments]] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("name", "cache_event", "load_metrics", "latency_metrics", "xtensor_info", "incarnation_id")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CACHE_EVENT_FIELD_NUMBER: _ClassVar[int]
    LOAD_METRICS_FIELD_NUMBER: _ClassVar[int]
    LATENCY_METRICS_FIELD_NUMBER: _ClassVar[int]
    XTENSOR_INFO_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_ID_FIELD_NUMBER: _ClassVar[int]
    name: str
    cache_event: KvCacheEvent
    load_metrics: LoadMetrics
    latency_metrics: LatencyMetrics
    xtensor_info: XTensorHeartbeatInfo
    incarnation_id: str
    def __init__(self, name: _Optional[str] = ..., cache_event: _Optional[_Union[KvCacheEvent, _Mapping]] = ..., load_metrics: _Optional[_Union[LoadMetrics, _Mapping]] = ..., latency_metrics: _Optional[_Union[LatencyMetrics, _Mapping]] = ..., xtensor_info: _Optional[_Union[XTensorHeartbeatInfo, _Mapping]] = ..., incarnation_id: _Optional[str] = ...) -> None: ...

class InstanceID(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class InstanceIDs(_message.Message):
    __slots__ = ("names",)
    NAMES_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, names: _Optional[_Iterable[str]] = ...) -> None: ...

class Status(_message.Message):
    __slots__ = ("ok",)
    OK_FIELD_NUMBER: _ClassVar[int]
    ok: bool
    def __init__(self, ok: _Optional[bool] = ...) -> None: ...
