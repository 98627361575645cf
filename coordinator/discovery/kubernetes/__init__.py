"""Pods and EndpointSlices as instances, from the API server's lists and watches."""

from .access import Access
from .source import KubernetesObjects

__all__ = ["Access", "KubernetesObjects"]
