"""`pd-coordinator doctor`: looks at a cluster as the configuration describes it, and says what is wrong and what to do.

Every check has a deadline, so the whole takes a bounded time, whatever the instances do.
"""

from .examination import Options, examine
from .findings import Finding, Level, Report
from .rendering import as_json, as_text

__all__ = ["Finding", "Level", "Options", "Report", "as_json", "as_text", "examine"]
