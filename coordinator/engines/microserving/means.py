"""What all attempts of the engine work with."""

from dataclasses import dataclass

from coordinator.core.ids import WireIds
from coordinator.core.instance import Instance
from coordinator.engines.http_leg import refusal
from coordinator.engines.microserving.errands import Errands
from coordinator.engines.microserving.settings import MicroservingSettings
from coordinator.engines.microserving.task import Task
from coordinator.transport.client import HttpClient
from coordinator.transport.reply import Reply
from coordinator.wire.chat_shape import ChatEditor
from coordinator.wire.completion_stream import CompletionEditor
from coordinator.wire.microserving import plain_refusal


@dataclass(frozen=True, slots=True)
class Means:
    """What all attempts work with."""

    client: HttpClient
    ids: WireIds
    errands: Errands
    settings: MicroservingSettings


def editor_of(task: Task, wire_id: str) -> CompletionEditor:
    """Who edits the stream of an attempt."""
    reading = task.reading(wire_id)
    return ChatEditor(reading, task.progress.started) if task.chat else CompletionEditor(reading)


def explained(instance: Instance, reply: Reply) -> Exception:
    """A refusal or failure of an engine, its words unwrapped."""
    return refusal(instance, reply.status, reply.headers, plain_refusal(reply.body))
