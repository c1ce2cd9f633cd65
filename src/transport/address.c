/* address.c - IP addresses: text, families, what they mean. */
#include "transport/address.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/fork.h"
#include "base/param.h"
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

void tly_address_compose(const char *host, uint16_t port, char *out, size_t len)
{
    snprintf(out, len, strchr(host, ':') ? "[%s]:%u" : "%s:%u", host, port);
}

void tly_address_text(const struct sockaddr_storage *a, char *out, size_t len)
{
    char host[INET6_ADDRSTRLEN];
    tly_address_host(a, host, sizeof host);
    tly_address_compose(host, tly_address_port(a), out, len);
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

/* A name or an IPv4 address; or IPv6, perhaps with a scope ("fe80::1%eth0"). */
static bool address_is_host(const char *host)
{
    char address[INET6_ADDRSTRLEN];
    struct in6_addr ignored;
    size_t n = strcspn(host, "%");
    if (!strchr(host, ':'))
        return true;
    if (n >= sizeof address)
        return false;
    memcpy(address, host, n);
    address[n] = '\0';
    return inet_pton(AF_INET6, address, &ignored) == 1;
}

int tly_address_split(const char *text, char *host, size_t len, uint16_t *port)
{
    const char *begin = text, *end, *colon = NULL;
    if (*text == '[') {
        begin++;
        end = strchr(begin, ']');
        if (!end || (end[1] && end[1] != ':'))
            return -EINVAL;
        colon = end[1] ? end + 1 : NULL;
    } else {
        colon = strchr(text, ':');
        if (colon && strchr(colon + 1, ':'))
            colon = NULL; /* IPv6 without brackets has no port */
        end = colon ? colon : text + strlen(text);
    }
    if (end == begin || (size_t)(end - begin) >= len)
        return -EINVAL;
    double v = 0;
    if (colon) {
        const char *stop = colon + 1;
        if (!tly_digits(&stop, false, &v) || *stop || v < 1 || v > 65535)
            return -EINVAL;
    }
    memcpy(host, begin, (size_t)(end - begin));
    host[end - begin] = '\0';
    if (!address_is_host(host))
        return -EINVAL;
    if (colon)
        *port = (uint16_t)v;
    return 0;
}

int tly_address_read(const char *text, struct sockaddr_storage *out)
{
    char host[INET6_ADDRSTRLEN];
    uint16_t port = 0;
    if (tly_address_split(text, host, sizeof host, &port) != 0 || !port)
        return -EINVAL;
    return tly_address_parse(host, port, out);
}
