"""Simulated xLLM instances: prefill, decode, both in one, over baidu_std and HTTP."""
