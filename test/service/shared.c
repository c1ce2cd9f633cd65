/* shared.c - see shared.h. */
#include "shared.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "job.h"

const int64_t *shared_values_of(tally_op *op)
{
    const void *data = NULL;
    CHECK(tally_op_wait(op, -1) == 0);
    CHECK(tally_shared_values(op, &data) == 0);
    tally_op_free(op);
    return data;
}

void shared_create(tally_comm *c, const char *name, const void *values, size_t count, enum tally_dtype dtype,
                   uint32_t staleness)
{
    tally_op *op;
    CHECK(tally_shared_create(c, name, tally_comm_rank(c) ? NULL : values, count, dtype, staleness, NULL,
                              &op) == 0);
    job_expect(op, 0);
}

const int64_t *shared_add(tally_comm *c, const char *name, const void *difference)
{
    tally_op *op;
    CHECK(tally_shared_add(c, name, difference, NULL, &op) == 0);
    return shared_values_of(op);
}

const int64_t *shared_read(tally_comm *c, const char *name)
{
    tally_op *op;
    CHECK(tally_shared_read(c, name, NULL, &op) == 0);
    return shared_values_of(op);
}

/* What rank `rank` adds to element i in each step. */
int64_t shared_difference(int rank, int i)
{
    return (int64_t)rank * 1000003 + i * 7 + 1;
}

int64_t *shared_differences(int rank, int count)
{
    int64_t *x = malloc((size_t)count * sizeof *x);
    CHECK(x);
    for (int i = 0; i < count; i++)
        x[i] = shared_difference(rank, i);
    return x;
}

/* The values once all ranks have made all their steps. */
void shared_check(const int64_t *values, int ranks, int count, int steps)
{
    for (int i = 0; i < count; i++) {
        int64_t wanted = i;
        for (int rank = 0; rank < ranks; rank++)
            wanted += steps * shared_difference(rank, i);
        CHECK(values[i] == wanted);
    }
}

int64_t *shared_first(int count)
{
    int64_t *x = malloc((size_t)count * sizeof *x);
    CHECK(x);
    for (int i = 0; i < count; i++)
        x[i] = i;
    return x;
}

/* End one of this process's connections, as a network may.  Each connection has a few losses. */
void shared_lose_a_connection(uint64_t *random)
{
    int found[256], count = 0;
    for (int fd = 3; fd < 1024 && count < 256; fd++) {
        struct sockaddr_in here, there;
        socklen_t len = sizeof here, other = sizeof there;
        if (getsockname(fd, (struct sockaddr *)&here, &len) != 0 || here.sin_family != AF_INET ||
            getpeername(fd, (struct sockaddr *)&there, &other) != 0)
            continue;
        const char *port = strrchr(getenv("TALLY_COORD"), ':');
        int coordinator = port ? atoi(port + 1) : 0;
        if (ntohs(here.sin_port) != coordinator && ntohs(there.sin_port) != coordinator)
            found[count++] = fd;
    }
    if (count)
        shutdown(found[job_random(random) % (uint64_t)count], SHUT_RDWR);
}
