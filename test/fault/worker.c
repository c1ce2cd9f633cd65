/* worker.c - a rank for the fault tests: steps of tensors that fault.py can compute too, and a history of them.
 *
 *   worker FOLDER [seed=N] [sizes=A,B,...] [shuffle=0|1] [pause_ms=N] [late=STEP:MS] [leave=STEP] [differ=STEP:TENSOR]
 *          [cancel=N] [group=0|1] [kinds=1|2] [uneven=0|1]
 *
 * Tensor t of step s is input(seed, s, t, rank), `sizes[t]` elements of float32.  By t mod 8 it is broadcast (5), gathered
 * with a first dimension that differs by rank (7), summed out of place (odd) or in place; with `group` it is the even
 * ranks' alone (3).  With `kinds` others are reduced to a root (1), reduce-scattered (2), gathered into the caller's memory (4)
 * and exchanged (6), or, of the second kind, gathered to a root (1), scattered from one (2), reduce-scattered (4) and sent round
 * the ranks as a message (6).  With `uneven` all are summed, and in each 8 steps a rank does only the first few and joins; the
 * rest is noted as done when all have.  In `cancel` of 1000 steps a rank takes one of its operations back.  After each step the ranks agree
 * by one more operation whether to stop, which they do when FOLDER/stop is there.
 *
 * FOLDER/rank-N gets a line for each event, written whole at once, so that what precedes a kill is there:
 *   NS begin STEP TENSOR          submitted
 *   NS end STEP TENSOR 0 HASH     over, with BLAKE2b of the result
 *   NS end STEP TENSOR -ERRNO SENTENCE
 *   NS step STEP                  all of it is over
 *   NS period N                   all ranks have joined for the N-th time
 *   NS log LINE                   what the library says, down to the epoch of each operation
 *   NS failed -ERRNO SENTENCE     the communicator is; NS touched: and yet a buffer changed thereafter
 *   NS left                       closed in good order
 * NS is the monotonic clock.  `differ` halves what this rank submits of a tensor, of all tensors if it is -1. */
#include <errno.h>
#include <fcntl.h>
#include <sodium.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "tally/tally.h"

enum { MOST_TENSORS = 64, MOST_RANKS = 64, QUIET_MS = 300, ENDED_BY_ERROR = 3, PERIOD = 8 };

/* What is done with a tensor. */
enum kind {
    SUM,
    BROADCAST,
    GATHER_UNEVEN,
    REDUCE,
    REDUCE_SCATTER,
    GATHER_INTO,
    EXCHANGE,
    GATHER,
    SCATTER,
    MESSAGE
};

static struct {
    uint64_t seed;
    size_t count[MOST_TENSORS];
    int tensors, shuffle, pause_ms, cancel, group, kinds, uneven;
    long late_step, late_ms, leave_step, differ_step;
    int differ_tensor;
} plan = {.late_step = -1, .leave_step = -1, .differ_step = -1};

static int history = -1;
static float *input[MOST_TENSORS], *output[MOST_TENSORS];
static tally_op *ops[MOST_TENSORS], *sends[MOST_TENSORS];
static tally_group *even;

__attribute__((format(printf, 1, 2))) static void note(const char *format, ...)
{
    char line[2048];
    struct timespec now;
    va_list args;
    clock_gettime(CLOCK_MONOTONIC, &now);
    int len = snprintf(line, sizeof line, "%lld ", now.tv_sec * 1000000000ll + now.tv_nsec);
    va_start(args, format);
    len += vsnprintf(line + len, sizeof line - (size_t)len - 1, format, args);
    va_end(args);
    if (len > (int)sizeof line - 2)
        len = sizeof line - 2;
    for (int i = 0; i < len; i++)
        if (line[i] == '\n')
            line[i] = ' ';
    line[len++] = '\n';
    if (write(history, line, (size_t)len) != len)
        _exit(99);
}

/* All of it into the history, and what is for people to standard error too. */
static void hear(void *user, enum tally_log_level level, const char *line)
{
    note("log %s", line);
    if (level < TALLY_LOG_DEBUG)
        fprintf(stderr, "tally: %s\n", line);
}

static void sleep_ms(long ms)
{
    nanosleep(&(struct timespec){ms / 1000, ms % 1000 * 1000000}, NULL);
}

/* splitmix64; fault.py has it in NumPy. */
static uint64_t mix(uint64_t z)
{
    z += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

/* Floats of many magnitudes, so that each order of adding gives other bits. */
static void make_input(float *x, size_t count, long step, int tensor, int rank)
{
    uint64_t key = mix(mix(mix(mix(plan.seed) + (uint64_t)step) + (uint64_t)tensor) + (uint64_t)rank);
    for (size_t i = 0; i < count; i++) {
        uint64_t z = mix(key + i);
        uint32_t bits = (uint32_t)(z & 0x807fffff) | (uint32_t)(118 + (z >> 32) % 16) << 23;
        memcpy(x + i, &bits, sizeof bits);
    }
}

static enum kind kind_of(int tensor)
{
    static const enum kind kinds[3][8] = {
        {SUM, SUM, SUM, SUM, SUM, BROADCAST, SUM, GATHER_UNEVEN},
        {SUM, REDUCE, REDUCE_SCATTER, SUM, GATHER_INTO, BROADCAST, EXCHANGE, GATHER_UNEVEN},
        {SUM, GATHER, SCATTER, SUM, REDUCE_SCATTER, BROADCAST, MESSAGE, GATHER_UNEVEN}};
    return plan.uneven ? SUM : kinds[plan.kinds][tensor % 8];
}

static bool of_even_ranks(int tensor)
{
    return plan.group && tensor % 8 == 3;
}

/* An allgather's first dimension differs from rank to rank. */
static size_t own_count(int tensor, int rank)
{
    return plan.count[tensor] + (kind_of(tensor) == GATHER_UNEVEN ? (size_t)rank : 0);
}

/* Elements of its buffers. */
static size_t room(int tensor)
{
    return own_count(tensor, MOST_RANKS) * (plan.kinds ? 8 : 1);
}

/* How much of a tensor is rank `to`'s of what `from` has; fault.py has the same. */
static size_t piece(enum kind kind, int tensor, int from, int to)
{
    size_t count = plan.count[tensor];
    if (kind == EXCHANGE)
        return (size_t)((3 * from + 5 * to + tensor) % 4) * count / 8;
    if (kind == GATHER)
        return count / (size_t)(from + 1);
    return count / (size_t)(to + 1); /* REDUCE_SCATTER, SCATTER */
}

/* All but messages, which have no names. */
static int submit_kind(tally_comm *c, const char *name, long step, int t, size_t count,
                       const struct tally_options *o)
{
    int rank = tally_comm_rank(c), size = tally_comm_size(c), root = (int)((step + t) % size);
    enum kind kind = kind_of(t);
    size_t to[MOST_RANKS], from[MOST_RANKS], given = 0;
    for (int i = 0; i < size; i++) {
        to[i] = piece(kind, t, rank, i);
        from[i] = piece(kind, t, i, rank);
        given += to[i];
    }
    bool pieces = kind == REDUCE_SCATTER || kind == SCATTER || kind == EXCHANGE;
    make_input(input[t], pieces ? given : kind == GATHER ? to[0] : count, step, t, rank);
    enum tally_dtype type = TALLY_FLOAT32;
    switch (kind) {
    case BROADCAST:
        return tally_broadcast(c, name, input[t], count, type, root, o, &ops[t]);
    case GATHER_UNEVEN:
        return tally_allgather(c, name, input[t], count, type, o, &ops[t]);
    case REDUCE:
        return tally_reduce(c, name, input[t], output[t], count, type, TALLY_SUM, root, o, &ops[t]);
    case REDUCE_SCATTER:
        return tally_reduce_scatter(c, name, input[t], output[t], to, type, TALLY_SUM, o, &ops[t]);
    case GATHER_INTO:
        return tally_allgather_into(c, name, input[t], output[t], count, type, o, &ops[t]);
    case EXCHANGE:
        return tally_alltoall(c, name, input[t], to, output[t], from, type, o, &ops[t]);
    case GATHER:
        return tally_gather(c, name, input[t], to[0], output[t], from, type, root, o, &ops[t]);
    case SCATTER:
        return tally_scatter(c, name, input[t], to, output[t], to[rank], type, root, o, &ops[t]);
    case MESSAGE: {
        tally_op *sent;
        int err = tally_send(c, input[t], count, type, (rank + 1) % size, (uint32_t)t, o, &sent);
        if (err)
            return err;
        sends[t] = sent;
        return tally_recv(c, output[t], count, type, (rank + size - 1) % size, (uint32_t)t, o, &ops[t]);
    }
    default:
        return tally_push_pull(c, name, input[t], t % 2 ? output[t] : input[t], count, type, TALLY_SUM, o,
                               &ops[t]);
    }
}

static int submit(tally_comm *c, long step, int t)
{
    char name[32];
    int rank = tally_comm_rank(c);
    size_t count = own_count(t, rank);
    struct tally_options o = {.size = sizeof o, .priority = -t, .group = of_even_ranks(t) ? even : NULL};
    if (of_even_ranks(t) && rank % 2)
        return 0;
    if (step == plan.differ_step && (t == plan.differ_tensor || plan.differ_tensor < 0))
        count /= 2;
    snprintf(name, sizeof name, "tensor %d", t);
    note("begin %ld %d", step, t);
    return submit_kind(c, name, step, t, count, &o);
}

/* Elements that this rank gets of it. */
static size_t result_count(const tally_comm *c, long step, int t)
{
    int rank = tally_comm_rank(c), size = tally_comm_size(c), root = (int)((step + t) % size);
    enum kind kind = kind_of(t);
    size_t count = 0;
    if (kind == GATHER_INTO)
        return plan.count[t] * (size_t)size;
    if (kind == REDUCE)
        return rank == root ? plan.count[t] : 0;
    if (kind == REDUCE_SCATTER || kind == SCATTER)
        return piece(kind, t, 0, rank);
    if (kind != EXCHANGE && kind != GATHER)
        return plan.count[t];
    for (int i = 0; i < size; i++)
        count += kind == EXCHANGE || rank == root ? piece(kind, t, i, rank) : 0;
    return count;
}

static void note_result(const tally_comm *c, long step, int t)
{
    unsigned char hash[16];
    char text[33];
    const int64_t *firsts;
    enum kind kind = kind_of(t);
    bool in_place = kind == BROADCAST || (kind == SUM && t % 2 == 0);
    const void *data = in_place ? input[t] : output[t];
    size_t bytes = result_count(c, step, t) * sizeof(float);
    if (kind == GATHER_UNEVEN)
        tally_op_gathered(ops[t], &data, &bytes, &firsts);
    crypto_generichash(hash, sizeof hash, data, bytes, NULL, 0);
    sodium_bin2hex(text, sizeof text, hash, sizeof hash);
    note("end %ld %d 0 %s", step, t, text);
}

/* In an order of this rank's own. */
static int submit_all(tally_comm *c, long step)
{
    int order[MOST_TENSORS];
    for (int i = 0; i < plan.tensors; i++) {
        int j = plan.shuffle
                    ? (int)(mix(mix(plan.seed + (uint64_t)step) + (uint64_t)(tally_comm_rank(c) * 64 + i)) %
                            (uint64_t)(i + 1))
                    : i;
        order[i] = order[j];
        order[j] = i;
    }
    for (int i = 0; i < plan.tensors; i++) {
        int err = submit(c, step, order[i]);
        if (err)
            return err;
    }
    return 0;
}

/* At some moment between the first begin and the last end. */
static void cancel_one(tally_comm *c, long step)
{
    uint64_t z = mix(mix(mix(plan.seed) + (uint64_t)step) + 1000 + (uint64_t)tally_comm_rank(c));
    if (z % 1000 >= (uint64_t)plan.cancel)
        return;
    nanosleep(&(struct timespec){0, (long)((z >> 20) % 4000 * ((z >> 40) % 1000))}, NULL);
    tally_op *op = ops[(z >> 10) % (uint64_t)plan.tensors];
    if (op &&
        kind_of((int)((z >> 10) % (uint64_t)plan.tensors)) != MESSAGE) /* of which its sender knows nothing */
        tally_op_cancel(op, "by chance");
}

/* An operation that fails alone (a verdict) is noted; one that fails because the communicator has ends the work. */
static int wait_all(tally_comm *c, long step)
{
    int result = 0;
    for (int t = 0; t < plan.tensors; t++) {
        if (!ops[t])
            continue;
        int err = tally_op_wait(ops[t], -1);
        if (sends[t]) {
            int err2 = tally_op_wait(sends[t], -1);
            err = err ? err : err2;
            tally_op_free(sends[t]);
            sends[t] = NULL;
        }
        if (err)
            note("end %ld %d %d %s", step, t, err, tally_op_error(ops[t]));
        else
            note_result(c, step, t);
        tally_op_free(ops[t]);
        ops[t] = NULL;
        if (err && tally_comm_status(c, NULL))
            result = err;
    }
    return result;
}

/* Do all ranks go on?  1, 0 or an error. */
static int agree(tally_comm *c, const char *stop)
{
    int32_t flag = access(stop, F_OK) == 0;
    tally_op *op;
    int err = tally_push_pull(c, "stop", &flag, &flag, 1, TALLY_INT32, TALLY_MAX, NULL, &op);
    if (err)
        return err;
    err = tally_op_wait(op, -1);
    tally_op_free(op);
    return err ? err : !flag;
}

/* All operations have ended: from now on the buffers are this program's alone. */
static void stay_untouched(void)
{
    for (int t = 0; t < plan.tensors; t++) {
        memset(input[t], 0xa5, room(t) * sizeof(float));
        memset(output[t], 0xa5, room(t) * sizeof(float));
    }
    sleep_ms(QUIET_MS);
    for (int t = 0; t < plan.tensors; t++)
        for (size_t i = 0; i < room(t) * sizeof(float); i++)
            if (((unsigned char *)input[t])[i] != 0xa5 || ((unsigned char *)output[t])[i] != 0xa5) {
                note("touched %d %zu", t, i);
                return;
            }
}

/* How many of the period's steps a rank has input for. */
static long share(long period, int rank)
{
    return 1 + (long)(mix(mix(mix(plan.seed) + (uint64_t)period) + 2000 + (uint64_t)rank) % PERIOD);
}

static int join(tally_comm *c)
{
    tally_op *op;
    int err = tally_join(c, NULL, &op);
    if (err)
        return err;
    err = tally_op_wait(op, -1);
    tally_op_free(op);
    return err;
}

static int work(tally_comm *c, const char *stop)
{
    for (long step = 0;; step++) {
        if (step == plan.late_step)
            sleep_ms(plan.late_ms);
        if (step == plan.leave_step)
            return 0;
        int err = submit_all(c, step);
        if (!err)
            cancel_one(c, step);
        int err2 = wait_all(c, step);
        if (err || err2)
            return err ? err : err2;
        note("step %ld", step);
        if (plan.uneven && step % PERIOD + 1 < share(step / PERIOD, tally_comm_rank(c))) {
            sleep_ms(plan.pause_ms);
            continue;
        }
        if (plan.uneven) {
            err = join(c);
            if (err)
                return err;
            while (++step % PERIOD)
                note("step %ld", step);
            note("period %ld", step / PERIOD);
            step--;
        }
        err = agree(c, stop);
        if (err <= 0)
            return err;
        if (plan.pause_ms)
            sleep_ms(plan.pause_ms);
    }
}

static void read_plan(int argc, char **argv)
{
    for (int i = 2; i < argc; i++) {
        char *value = strchr(argv[i], '=');
        if (!value)
            exit(2);
        *value++ = '\0';
        if (strcmp(argv[i], "seed") == 0)
            plan.seed = strtoull(value, NULL, 10);
        else if (strcmp(argv[i], "sizes") == 0)
            for (char *s = strtok(value, ","); s && plan.tensors < MOST_TENSORS; s = strtok(NULL, ","))
                plan.count[plan.tensors++] = strtoull(s, NULL, 10);
        else if (strcmp(argv[i], "shuffle") == 0)
            plan.shuffle = atoi(value);
        else if (strcmp(argv[i], "pause_ms") == 0)
            plan.pause_ms = atoi(value);
        else if (strcmp(argv[i], "cancel") == 0)
            plan.cancel = atoi(value);
        else if (strcmp(argv[i], "group") == 0)
            plan.group = atoi(value);
        else if (strcmp(argv[i], "kinds") == 0)
            plan.kinds = atoi(value) % 3;
        else if (strcmp(argv[i], "uneven") == 0)
            plan.uneven = atoi(value);
        else if (strcmp(argv[i], "late") == 0)
            sscanf(value, "%ld:%ld", &plan.late_step, &plan.late_ms);
        else if (strcmp(argv[i], "leave") == 0)
            plan.leave_step = atol(value);
        else if (strcmp(argv[i], "differ") == 0)
            sscanf(value, "%ld:%d", &plan.differ_step, &plan.differ_tensor);
        else
            exit(2);
    }
    for (int t = 0; t < plan.tensors; t++) {
        input[t] = malloc(room(t) * sizeof(float));
        output[t] = malloc(room(t) * sizeof(float));
        if (!input[t] || !output[t])
            exit(2);
    }
}

int main(int argc, char **argv)
{
    char path[512], stop[512];
    tally_comm *c;
    if (argc < 2 || sodium_init() < 0)
        return 2;
    read_plan(argc, argv);
    snprintf(path, sizeof path, "%s/rank-%s", argv[1], getenv("RANK"));
    snprintf(stop, sizeof stop, "%s/stop", argv[1]);
    history = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (history < 0)
        return 2;
    tally_log_redirect(hear, NULL);
    int err = tally_comm_open((const char *[]){"TALLY_LOG=debug", NULL}, &c);
    if (err) {
        note("failed %d %s", err, tally_error());
        return ENDED_BY_ERROR;
    }
    note("joined %d %d", tally_comm_size(c), tally_comm_service_count(c));
    int ranks[MOST_TENSORS], count = (tally_comm_size(c) + 1) / 2;
    for (int i = 0; i < count; i++)
        ranks[i] = 2 * i;
    if (plan.group && tally_comm_rank(c) % 2 == 0 &&
        tally_group_create(c, "even", ranks, (size_t)count, &even))
        return 2;
    err = work(c, stop);
    if (err) {
        char sentence[1024];
        const char *last = NULL;
        snprintf(sentence, sizeof sentence, "%s", tally_error());
        note("failed %d %s", err, tally_comm_status(c, &last) ? last : sentence);
        stay_untouched();
    }
    tally_comm_close(c);
    if (!err)
        note("left");
    return err ? ENDED_BY_ERROR : 0;
}
