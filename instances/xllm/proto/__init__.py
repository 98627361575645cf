"""Messages of xLLM, xllm-service and brpc: the fields of all known versions, and the code generated from them."""
