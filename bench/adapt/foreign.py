"""Traffic that is no job's: a stream from one host to another until it is killed.  SPDX-License-Identifier: Apache-2.0

    foreign.py in | foreign.py out ADDRESS
"""

import socket
import sys

PORT = 5002


def main():
    if sys.argv[1] == "in":
        with socket.create_server(("", PORT)) as listener:
            print("listening", flush=True)
            stream, _ = listener.accept()
            while stream.recv(1 << 20):
                pass
    else:
        with socket.create_connection((sys.argv[2], PORT)) as stream:
            while True:
                stream.sendall(bytes(1 << 20))


if __name__ == "__main__":
    main()
