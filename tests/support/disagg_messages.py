"""The messages of seed 004's package, made by the protobuf library itself from names and field numbers."""

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

KINDS = descriptor_pb2.FieldDescriptorProto
STRING, INT32, FLOAT, BYTES, BOOL = (
    KINDS.TYPE_STRING, KINDS.TYPE_INT32, KINDS.TYPE_FLOAT, KINDS.TYPE_BYTES, KINDS.TYPE_BOOL,
)  # fmt: skip
ASKED = [("max_new_tokens", INT32), ("temperature", FLOAT)]
DATA = [("k_data", BYTES), ("v_data", BYTES)]
MESSAGES = {
    "PreFillRequest": [("request_id", STRING), ("token_ids", [INT32]), *ASKED],
    "KVBlock": [("request_id", STRING), ("layer_idx", INT32), ("block_idx", INT32), *DATA],
    "KVBlockStream": [("block", "KVBlock"), ("done", BOOL)],
    "DecodeRequest": [("request_id", STRING), ("kv_blocks", ["KVBlock"]), ("token_ids", [INT32]), *ASKED],
    "TokenStream": [("request_id", STRING), ("token_id", INT32), ("done", BOOL), ("finish_reason", STRING)],
    "HealthCheckResponse": [("status", INT32)],
}


def _file():
    made = descriptor_pb2.FileDescriptorProto(name="disagg_of_tests.proto", package="disagg", syntax="proto3")
    for name, fields in MESSAGES.items():
        message = made.message_type.add(name=name)
        for number, (field, kind) in enumerate(fields, 1):
            repeated = isinstance(kind, list)
            added = message.field.add(name=field, number=number)
            added.label = KINDS.LABEL_REPEATED if repeated else KINDS.LABEL_OPTIONAL
            value = kind[0] if repeated else kind
            if isinstance(value, str):
                added.type, added.type_name = KINDS.TYPE_MESSAGE, f".disagg.{value}"
            else:
                added.type = value
    return made


_POOL = descriptor_pool.DescriptorPool()
_POOL.Add(_file())
PreFillRequest, KVBlock, KVBlockStream, DecodeRequest, TokenStream, HealthCheckResponse = (
    message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"disagg.{name}")) for name in MESSAGES
)
