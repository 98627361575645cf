"""Sources of instances beside the configuration, the instances API and the controller: files, DNS, Kubernetes.

Each names a set of instances; the cluster's members of that source are made the same. What cannot be asked keeps what
it named last.
"""

from .discovery import Discovery, Plan
from .plans import make_plans, problems

__all__ = ["Discovery", "Plan", "make_plans", "problems"]
