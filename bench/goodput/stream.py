"""What one TCP stream carries from host to host: the B of the equations, measured in the run that it is used in.

It is also the program at both ends: stream.py in | stream.py out ADDRESS.  SPDX-License-Identifier: Apache-2.0
"""

import socket
import statistics
import sys
import time

PORT, SECONDS, WARM_UP_S, SLICE_S = 5001, 2.0, 0.5, 0.1


def bandwidths(lab, hosts, tries):
    """{host: bytes/s}.  Hosts with cards of one rate have the same: from the fastest host to one of them, the best of
    so many tries, for a busy machine only ever takes something away.  A fastest host that has no equal gets its
    rate's share of the next one's."""
    by_rate = {}
    fastest = max(hosts, key=lab.rate)
    for host in hosts:
        rate = lab.rate(host)
        if host != fastest and rate not in by_rate:
            by_rate[rate] = max(measure(lab, fastest, host) for _ in range(tries))
    top = lab.rate(fastest)
    if top not in by_rate:
        next_rate = max(by_rate)
        by_rate[top] = by_rate[next_rate] * top / next_rate
    return {host: by_rate[lab.rate(host)] for host in hosts}


def measure(lab, source, sink):
    at_sink = lab.start(sink, [sys.executable, __file__, "in"])
    while "listening" not in at_sink.output():
        if at_sink.poll() is not None:
            raise OSError(at_sink.output())
        time.sleep(0.01)
    sent = lab.run(source, [sys.executable, __file__, "out", lab.address(sink)])
    result = at_sink.wait(30)
    if sent.status or result.status:
        raise OSError(sent.output + result.output)
    return float(result.output.split()[-1])


def stream_out(address):
    end = time.monotonic() + SECONDS
    with socket.socket() as s:
        s.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")
        s.connect((address, PORT))
        chunk = bytes(1 << 20)
        while time.monotonic() < end:
            s.sendall(chunk)


def stream_in():
    """Prints bytes/s: the median over slices."""
    with socket.create_server(("", PORT)) as listener:
        print("listening", flush=True)
        peer = listener.accept()[0]
    buffer = bytearray(1 << 18)
    begin = mark = time.monotonic()
    got, slices = 0, []
    while n := peer.recv_into(buffer):
        got += n
        now = time.monotonic()
        if now - mark >= SLICE_S:
            if now - begin > WARM_UP_S:
                slices.append(got / (now - mark))
            mark, got = now, 0
    print(statistics.median(slices))


if __name__ == "__main__":
    if sys.argv[1:2] == ["in"]:
        stream_in()
    else:
        stream_out(sys.argv[2])
