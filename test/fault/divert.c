/* divert.c - preloaded into ranks by the fault tests: connect() goes to a proxy instead.  FAULT_DIVERT has
 * "PORT:PROXY,..." of loopback; whatever is not named there goes where it would. */
#include <arpa/inet.h>
#include <dlfcn.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

static int instead_of(int port)
{
    const char *s = getenv("FAULT_DIVERT");
    while (s && *s) {
        char *end;
        long from = strtol(s, &end, 10);
        long to = *end == ':' ? strtol(end + 1, &end, 10) : from;
        if (from == port)
            return (int)to;
        s = *end == ',' ? end + 1 : NULL;
    }
    return port;
}

__attribute__((visibility("default"))) int connect(int fd, const struct sockaddr *address, socklen_t len)
{
    static int (*next)(int, const struct sockaddr *, socklen_t);
    struct sockaddr_in other;
    if (!next)
        *(void **)&next = dlsym(RTLD_NEXT, "connect");
    if (address->sa_family == AF_INET && len >= sizeof other) {
        memcpy(&other, address, sizeof other);
        other.sin_port = htons((uint16_t)instead_of(ntohs(other.sin_port)));
        return next(fd, (const struct sockaddr *)&other, sizeof other);
    }
    return next(fd, address, len);
}
