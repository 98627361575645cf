"""The OpenAI dialect, as vLLM and SGLang instances speak it."""
