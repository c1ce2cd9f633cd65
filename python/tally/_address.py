"""HOST:PORT, for what Tally hands on: IPv6 stands in brackets.  The C library has the same two functions.

SPDX-License-Identifier: Apache-2.0
"""


def join(host, port):
    """HOST:PORT."""
    return "[%s]:%s" % (host, port) if ":" in host else "%s:%s" % (host, port)


def split(text):
    """(host, port or None, both text) of HOST, HOST:PORT, [V6], [V6]:PORT or a bare V6."""
    if text.startswith("["):
        host, _, port = text[1:].partition("]")
        return host, port[1:] or None
    if text.count(":") == 1:
        host, _, port = text.partition(":")
        return host, port or None
    return text, None
