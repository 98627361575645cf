"""Text to token ids and back, for engines that take ids: tokenizers, chat templates, incremental text, stop strings.

Needs the extra `pd-coordinator[tokens]`, which is imported where a tokenizer is loaded and nowhere else.
"""

from .detokenizer import Detokenizer
from .folder import missing_extra
from .shelf import Loaded, Tokenizers
from .stops import StopWatch
from .tokenizer import Tokenizer

__all__ = ["Detokenizer", "Loaded", "StopWatch", "Tokenizer", "Tokenizers", "missing_extra"]
