/* worker.c - a rank for the fault tests: steps of tensors that fault.py can compute too, and a history of them.
 *
 *   worker FOLDER [seed=N] [sizes=A,B,...] [shuffle=0|1] [pause_ms=N] [late=STEP:MS] [leave=STEP] [differ=STEP:TENSOR]
 *          [cancel=N] [group=0|1]
 *
 * Tensor t of step s is input(seed, s, t, rank), `sizes[t]` elements of float32.  By t mod 8 it is broadcast (5), gathered
 * with a first dimension that differs by rank (7), summed out of place (odd) or in place; with `group` it is the even
 * ranks' alone (3).  In `cancel` of 1000 steps a rank takes one of its operations back.  After each step the ranks agree
 * by one more operation whether to stop, which they do when FOLDER/stop is there.
 *
 * FOLDER/rank-N gets a line for each event, written whole at once, so that what precedes a kill is there:
 *   NS begin STEP TENSOR          submitted
 *   NS end STEP TENSOR 0 HASH     over, with BLAKE2b of the result
 *   NS end STEP TENSOR -ERRNO SENTENCE
 *   NS step STEP                  all of it is over
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

enum { MOST_TENSORS = 64, QUIET_MS = 300, ENDED_BY_ERROR = 3 };

static struct {
    uint64_t seed;
    size_t count[MOST_TENSORS];
    int tensors, shuffle, pause_ms, cancel, group;
    long late_step, late_ms, leave_step, differ_step;
    int differ_tensor;
} plan = {.late_step = -1, .leave_step = -1, .differ_step = -1};

static int history = -1;
static float *input[MOST_TENSORS], *output[MOST_TENSORS];
static tally_op *ops[MOST_TENSORS];
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

static bool gathers(int tensor)
{
    return tensor % 8 == 7;
}

static bool broadcasts(int tensor)
{
    return tensor % 8 == 5;
}

static bool of_even_ranks(int tensor)
{
    return plan.group && tensor % 8 == 3;
}

/* An allgather's first dimension differs from rank to rank. */
static size_t own_count(int tensor, int rank)
{
    return plan.count[tensor] + (gathers(tensor) ? (size_t)rank : 0);
}

static int submit(tally_comm *c, long step, int t)
{
    char name[32];
    int rank = tally_comm_rank(c), size = tally_comm_size(c);
    size_t count = own_count(t, rank);
    struct tally_options o = {.size = sizeof o, .priority = -t, .group = of_even_ranks(t) ? even : NULL};
    if (of_even_ranks(t) && rank % 2)
        return 0;
    if (step == plan.differ_step && (t == plan.differ_tensor || plan.differ_tensor < 0))
        count /= 2;
    snprintf(name, sizeof name, "tensor %d", t);
    make_input(input[t], count, step, t, rank);
    note("begin %ld %d", step, t);
    if (broadcasts(t))
        return tally_broadcast(c, name, input[t], count, TALLY_FLOAT32, (int)((step + t) % size), &o,
                               &ops[t]);
    if (gathers(t))
        return tally_allgather(c, name, input[t], count, TALLY_FLOAT32, &o, &ops[t]);
    return tally_push_pull(c, name, input[t], t % 2 ? output[t] : input[t], count, TALLY_FLOAT32, TALLY_SUM,
                           &o, &ops[t]);
}

static void note_result(long step, int t)
{
    unsigned char hash[16];
    char text[33];
    const int64_t *firsts;
    const void *data = broadcasts(t) || t % 2 == 0 ? input[t] : output[t];
    size_t bytes = plan.count[t] * sizeof(float);
    if (gathers(t))
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
    if (op)
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
        if (err)
            note("end %ld %d %d %s", step, t, err, tally_op_error(ops[t]));
        else
            note_result(step, t);
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
        memset(input[t], 0xa5, own_count(t, 64) * sizeof(float));
        memset(output[t], 0xa5, own_count(t, 64) * sizeof(float));
    }
    sleep_ms(QUIET_MS);
    for (int t = 0; t < plan.tensors; t++)
        for (size_t i = 0; i < own_count(t, 64) * sizeof(float); i++)
            if (((unsigned char *)input[t])[i] != 0xa5 || ((unsigned char *)output[t])[i] != 0xa5) {
                note("touched %d %zu", t, i);
                return;
            }
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
        input[t] = malloc(own_count(t, 64) * sizeof(float));
        output[t] = malloc(own_count(t, 64) * sizeof(float));
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
