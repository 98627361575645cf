"""The HTTP/1.1 server that clients talk to: it knows requests and answers, and nothing of what they are about."""
