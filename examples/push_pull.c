/* push_pull.c - Tally from plain C: each rank contributes a vector, each gets the sum.
 *
 *   tally run -n 4 -k 2 -- examples/push_pull
 *
 * Under any launcher that sets ranks (torchrun, mpirun, srun) it runs over several machines. */
#include <stdio.h>
#include <stdlib.h>

#include <tally/tally.h>

static void check(int err)
{
    if (err < 0) {
        fprintf(stderr, "%s\n", tally_error());
        exit(1);
    }
}

int main(void)
{
    enum { COUNT = 1000000 };
    tally_comm *comm;
    tally_op *op;
    static float gradient[COUNT];

    check(tally_comm_open(NULL, &comm));
    int rank = tally_comm_rank(comm), size = tally_comm_size(comm);
    for (int i = 0; i < COUNT; i++)
        gradient[i] = (float)(rank + 1);

    /* In place: the sum replaces the input. */
    check(tally_push_pull(comm, "gradient", gradient, gradient, COUNT, TALLY_FLOAT32, TALLY_SUM, NULL, &op));
    /* ... compute something else here; the transfer goes on ... */
    check(tally_op_wait(op, -1));
    tally_op_free(op);

    float expected = (float)(size * (size + 1)) / 2;
    int wrong = 0;
    for (int i = 0; i < COUNT; i++)
        wrong += gradient[i] != expected;
    if (rank == 0)
        printf("%d ranks on %d machines, %d services: each of %d sums is %g, %d are wrong\n", size,
               tally_comm_machine_count(comm), tally_comm_service_count(comm), COUNT, (double)expected,
               wrong);
    check(tally_comm_close(comm));
    return wrong != 0;
}
