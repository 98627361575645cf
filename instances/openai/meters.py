"""What both engines count."""

import time
from collections import Counter

from instances.exposition import Histogram
from instances.openai.ask import Choice, Job

_SECONDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 60.0)
_TOKENS = (1.0, 10.0, 100.0, 1000.0, 10000.0)


class Meters:
    """Counters and histograms of one instance.

    Attributes:
        requests: that were valid.
        prompt_tokens: by where their KV came from: `computed`, `cached` or `transferred`.
        ended: by finish reason, `abort` and `error` included.
    """

    def __init__(self) -> None:
        self.requests = 0
        self.prompt_tokens: Counter[str] = Counter()
        self.generated_tokens = 0
        self.ended: Counter[str] = Counter()
        self.first_token_s = Histogram(_SECONDS)
        self.between_tokens_s = Histogram(_SECONDS)
        self.request_s = Histogram(_SECONDS)
        self.prompt_length = Histogram(_TOKENS)
        self.answer_length = Histogram(_TOKENS)

    def computed(self, choice: Choice) -> None:
        """A prompt's KV was computed here, but for what was cached."""
        self.prompt_tokens["cached"] += choice.cached_tokens
        self.prompt_tokens["computed"] += len(choice.prompt.tokens) - choice.cached_tokens

    def transferred(self, choice: Choice) -> None:
        """A prompt's KV came from another instance."""
        self.prompt_tokens["transferred"] += len(choice.prompt.tokens)

    def token(self, job: Job, choice: Choice, since_last_s: float) -> None:
        """A token exists."""
        self.generated_tokens += 1
        if choice.sent == 1:
            self.first_token_s.observe(time.monotonic() - job.began_s)
        else:
            self.between_tokens_s.observe(since_last_s)

    def end(self, job: Job, reason: str = "") -> None:
        """A request is over; `reason` where it is not the sequences' own finish reason."""
        self.request_s.observe(time.monotonic() - job.began_s)
        for choice in job.choices:
            self.ended[reason or choice.finish] += 1
            self.prompt_length.observe(len(choice.prompt.tokens))
            self.answer_length.observe(choice.sent)
