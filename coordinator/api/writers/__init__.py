"""Answers in the shapes of the APIs' own servers, made of what an engine has generated: one module per dialect.

Pure, as the whole package: values in, bytes out; one writer for each request.
"""

from .answer import LENGTH, STOP, STOP_STRING, Delta, TokenLogprob, Usage, Writer
from .table import writer_of

__all__ = ["LENGTH", "STOP", "STOP_STRING", "Delta", "TokenLogprob", "Usage", "Writer", "writer_of"]
