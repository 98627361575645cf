"""SHELF 3: one module or package per engine protocol; each is the choreography of one engine family's calls.

Engines do not know each other. What several of them need of plain HTTP legs stands in `http_leg`.
"""
