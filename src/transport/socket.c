/* socket.c - sockets of any family: one more descriptor, also beyond the soft limit. */
#include "transport/socket.h"

#include <errno.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include "base/fork.h"

/* With many ranks the usual 1024 descriptors do not do.  The application's limit is left alone until then. */
bool tly_socket_raise_limit(int err)
{
    struct rlimit files;
    if (err != EMFILE || getrlimit(RLIMIT_NOFILE, &files) != 0 || files.rlim_cur == files.rlim_max)
        return false;
    files.rlim_cur = files.rlim_max;
    return setrlimit(RLIMIT_NOFILE, &files) == 0;
}

int tly_socket_open(int family)
{
    int fd;
    do
        fd = tly_fd_own(socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    while (fd < 0 && tly_socket_raise_limit(errno));
    return fd;
}
