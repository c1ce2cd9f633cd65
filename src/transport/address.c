/* address.c - IP addresses: text, families, what they mean. */
#include "transport/address.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/fork.h"
#include "transport/socket.h"

socklen_t tly_address_len(const struct sockaddr_storage *a)
{
    return a->ss_family == AF_INET6 ? sizeof(struct sockaddr_in6) : sizeof(struct sockaddr_in);
}

uint16_t tly_address_port(const struct sockaddr_storage *a)
{
    return ntohs(a->ss_family == AF_INET6 ? ((const struct sockaddr_in6 *)a)->sin6_port
                                          : ((const struct sockaddr_in *)a)->sin_port);
}

void tly_address_set_port(struct sockaddr_storage *a, uint16_t port)
{
    if (a->ss_family == AF_INET6)
        ((struct sockaddr_in6 *)a)->sin6_port = htons(port);
    else
        ((struct sockaddr_in *)a)->sin_port = htons(port);
}

void tly_address_host(const struct sockaddr_storage *a, char *out, size_t len)
{
    bool v6 = a->ss_family == AF_INET6;
    const void *host = v6 ? (const void *)&((const struct sockaddr_in6 *)a)->sin6_addr
                          : (const void *)&((const struct sockaddr_in *)a)->sin_addr;
    if (!inet_ntop(v6 ? AF_INET6 : AF_INET, host, out, (socklen_t)len))
        snprintf(out, len, "?");
}

void tly_address_text(const struct sockaddr_storage *a, char *out, size_t len)
{
    char host[INET6_ADDRSTRLEN];
    tly_address_host(a, host, sizeof host);
    snprintf(out, len, a->ss_family == AF_INET6 ? "[%s]:%u" : "%s:%u", host, tly_address_port(a));
}

bool tly_address_is_loopback(const struct sockaddr_storage *a)
{
    if (a->ss_family == AF_INET6) {
        const struct in6_addr *i = &((const struct sockaddr_in6 *)a)->sin6_addr;
        return IN6_IS_ADDR_LOOPBACK(i) || (IN6_IS_ADDR_V4MAPPED(i) && i->s6_addr[12] == 127);
    }
    return ntohl(((const struct sockaddr_in *)a)->sin_addr.s_addr) >> 24 == 127;
}

bool tly_address_same_host(const struct sockaddr_storage *a, const struct sockaddr_storage *b)
{
    if (a->ss_family != b->ss_family)
        return false;
    if (a->ss_family == AF_INET6)
        return memcmp(&((const struct sockaddr_in6 *)a)->sin6_addr,
                      &((const struct sockaddr_in6 *)b)->sin6_addr, 16) == 0;
    return ((const struct sockaddr_in *)a)->sin_addr.s_addr ==
           ((const struct sockaddr_in *)b)->sin_addr.s_addr;
}

void tly_address_unmap(struct sockaddr_storage *a)
{
    struct sockaddr_in6 v6;
    struct sockaddr_in *v4 = (struct sockaddr_in *)a;
    memcpy(&v6, a, sizeof v6);
    if (a->ss_family != AF_INET6 || !IN6_IS_ADDR_V4MAPPED(&v6.sin6_addr))
        return;
    memset(a, 0, sizeof *a);
    v4->sin_family = AF_INET;
    v4->sin_port = v6.sin6_port;
    memcpy(&v4->sin_addr, v6.sin6_addr.s6_addr + 12, 4);
}

void tly_address_any(struct sockaddr_storage *out)
{
    struct sockaddr_storage a = {.ss_family = AF_INET6};
    int fd = tly_socket_open(AF_INET6);
    if (fd < 0 || bind(fd, (struct sockaddr *)&a, sizeof(struct sockaddr_in6)) < 0)
        a.ss_family = AF_INET;
    if (fd >= 0)
        tly_fd_close(fd);
    *out = a;
}

bool tly_address_is_any(const struct sockaddr_storage *a)
{
    if (a->ss_family == AF_INET6)
        return IN6_IS_ADDR_UNSPECIFIED(&((const struct sockaddr_in6 *)a)->sin6_addr);
    return ((const struct sockaddr_in *)a)->sin_addr.s_addr == htonl(INADDR_ANY);
}

bool tly_address_is_link_local(const struct sockaddr_storage *a)
{
    return a->ss_family == AF_INET6 && IN6_IS_ADDR_LINKLOCAL(&((const struct sockaddr_in6 *)a)->sin6_addr);
}

int tly_address_parse(const char *host, uint16_t port, struct sockaddr_storage *out)
{
    struct sockaddr_storage a = {0};
    struct sockaddr_in *v4 = (struct sockaddr_in *)&a;
    struct sockaddr_in6 *v6 = (struct sockaddr_in6 *)&a;
    if (inet_pton(AF_INET, host, &v4->sin_addr) == 1)
        a.ss_family = AF_INET;
    else if (inet_pton(AF_INET6, host, &v6->sin6_addr) == 1)
        a.ss_family = AF_INET6;
    else
        return -EINVAL;
    tly_address_set_port(&a, port);
    *out = a;
    return 0;
}

int tly_address_read(const char *text, struct sockaddr_storage *out)
{
    char host[INET6_ADDRSTRLEN + 2], *end;
    const char *colon = strrchr(text, ':');
    size_t len = colon ? (size_t)(colon - text) : 0;
    if (!len || len >= sizeof host || colon[1] < '0' || colon[1] > '9')
        return -EINVAL;
    unsigned long port = strtoul(colon + 1, &end, 10);
    bool brackets = text[0] == '[' && text[len - 1] == ']';
    if (*end || port > 65535 || (!brackets && memchr(text, ':', len)))
        return -EINVAL;
    memcpy(host, text + brackets, len - 2 * brackets);
    host[len - 2 * brackets] = '\0';
    return tly_address_parse(host, (uint16_t)port, out);
}
