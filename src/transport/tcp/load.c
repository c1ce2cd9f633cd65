/* load.c - what the kernel says of a TCP connection's backlog: a file of its own, for the kernel's header and the C
 * library's both have a struct tcp_info, and only the kernel's has these fields. */
#include <errno.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <stddef.h>
#include <sys/socket.h>

#include "transport/tcp/tcp.h"

int tly_tcp_load(int fd, struct tly_link_load *out)
{
    struct tcp_info info = {0};
    socklen_t len = sizeof info;
    if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &len) != 0)
        return -errno;
    if (len < offsetof(struct tcp_info, tcpi_sndbuf_limited))
        return -ENOTSUP; /* before Linux 4.10 */
    out->bytes = info.tcpi_bytes_acked;
    out->arrived = info.tcpi_bytes_received;
    uint64_t busy = info.tcpi_busy_time, shut = info.tcpi_rwnd_limited;
    out->busy_us = busy > shut ? busy - shut : 0;
    return 0;
}
