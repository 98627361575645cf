"""`pd-coordinator top`: the live feed of a running coordinator in a terminal.

`feed` listens, `shown` keeps what has come, `frame` makes lines of text of it, `terminal` puts them on the screen and
reads keys, `command` ties them together. A frame is some lines of text with a few colours, which is too little to
depend on a library for terminals.
"""
