/* speed.c - push_pull of a GPU's memory beside the plain copies of the same bytes, and beside copies that the application makes.
 *
 *   gpu_speed BYTES ROUNDS        under `tally run`
 *
 * Three ways take turns, each begun by all ranks at a time, in pieces of 8 MB:
 *   copies  between the GPU and pinned memory, both ways at once: the limit
 *   hand    the application copies each piece to pinned memory, push_pulls it there, and copies it back
 *   gpu     push_pull of the GPU's memory
 * Rank 0 prints a line of JSON: the ranks, the bytes, the median of each way in milliseconds, and on how many ranks the bits of
 * the last two differ. */
#include "test/gpu/program.h"

enum { PIECE = 8 << 20, MOST_PIECES = 64, MOST_ROUNDS = 100 };
enum way { COPIES, HAND, GPU, WAYS };

static size_t bytes;
static int pieces;
static void *out, *into;                        /* streams */
static uint8_t *host, *other, *x, *y, *results; /* pinned twice; on the GPU twice; of x and y, pinned */
static void *copied[MOST_PIECES];               /* events */

static size_t length(int piece)
{
    size_t left = bytes - (size_t)piece * PIECE;
    return left < PIECE ? left : PIECE;
}

static void push_pull(const char *way, int piece, uint8_t *at, const struct tally_options *o, tally_op **op)
{
    char name[32];
    snprintf(name, sizeof name, "%s %d", way, piece);
    CHECK(tally_push_pull(comm, name, at, at, length(piece) / sizeof(float), TALLY_FLOAT32, TALLY_SUM, o,
                          op) == 0);
}

static void by_copies(void)
{
    copy(host, x, bytes, out);
    copy(y, other, bytes, into);
    CHECK(cuStreamSynchronize(out) == 0 && cuStreamSynchronize(into) == 0);
}

static void by_hand(void)
{
    tally_op *op[MOST_PIECES];
    for (int i = 0; i < pieces; i++) {
        copy(host + (size_t)i * PIECE, y + (size_t)i * PIECE, length(i), out);
        CHECK(cuEventRecord(copied[i], out) == 0);
    }
    for (int i = 0; i < pieces; i++) {
        CHECK(cuEventSynchronize(copied[i]) == 0);
        push_pull("hand", i, host + (size_t)i * PIECE, NULL, &op[i]);
    }
    for (int i = 0; i < pieces; i++) {
        end(op[i]);
        copy(y + (size_t)i * PIECE, host + (size_t)i * PIECE, length(i), into);
    }
    CHECK(cuStreamSynchronize(into) == 0);
}

static void by_library(void)
{
    struct tally_options o = gpu_options();
    tally_op *op[MOST_PIECES];
    for (int i = 0; i < pieces; i++)
        push_pull("gpu", i, x + (size_t)i * PIECE, &o, &op[i]);
    for (int i = 0; i < pieces; i++)
        end(op[i]);
}

static double measure(enum way way)
{
    barrier();
    double begin = now_ms();
    way == COPIES ? by_copies() : way == HAND ? by_hand() : by_library();
    return now_ms() - begin;
}

/* Both ways start from the same numbers. */
static void write_numbers(void)
{
    float *numbers = (float *)(void *)results;
    for (size_t i = 0; i < bytes / sizeof(float); i++)
        numbers[i] = 1.0F / (float)(1 + (i + 31 * (size_t)tally_comm_rank(comm)) % 1000);
    copy(x, results, bytes, stream);
    copy(y, results, bytes, stream);
    CHECK(cuStreamSynchronize(stream) == 0);
}

static int differ(void)
{
    tally_op *op;
    write_numbers();
    by_hand();
    by_library();
    copy(results, x, bytes, stream);
    copy(results + bytes, y, bytes, stream);
    CHECK(cuStreamSynchronize(stream) == 0);
    int32_t ranks = memcmp(results, results + bytes, bytes) != 0;
    CHECK(tally_push_pull(comm, "differ", &ranks, &ranks, 1, TALLY_INT32, TALLY_SUM, NULL, &op) == 0);
    end(op);
    return ranks;
}

static int compare(const void *a, const void *b)
{
    double one = *(const double *)a, two = *(const double *)b;
    return (one > two) - (one < two);
}

int main(int argc, char **argv)
{
    double time[WAYS][MOST_ROUNDS];
    bytes = argc == 3 ? strtoul(argv[1], NULL, 10) : 0;
    const int rounds = argc == 3 ? atoi(argv[2]) : 0;
    if (!bytes || bytes % 4 || bytes > (size_t)MOST_PIECES * PIECE || rounds < 1 || rounds > MOST_ROUNDS) {
        fprintf(stderr, "usage: gpu_speed BYTES ROUNDS: up to 512 MB of float32, and %d rounds\n",
                MOST_ROUNDS);
        return 2;
    }
    pieces = (int)((bytes + PIECE - 1) / PIECE);
    open_rank();
    CHECK(cuStreamCreate(&out, 1) == 0 && cuStreamCreate(&into, 1) == 0);
    host = pinned(bytes);
    other = pinned(bytes);
    results = pinned(2 * bytes);
    x = on_gpu(bytes);
    y = on_gpu(bytes);
    for (int i = 0; i < pieces; i++)
        CHECK(cuEventCreate(&copied[i], 2) == 0);
    int wrong = differ();
    for (int i = -1; i < rounds; i++) { /* one to warm up, from numbers that do not grow */
        memset(results, 0, bytes);
        copy(x, results, bytes, stream);
        copy(y, results, bytes, stream);
        CHECK(cuStreamSynchronize(stream) == 0);
        for (enum way way = 0; way < WAYS; way++)
            time[way][i < 0 ? 0 : i] = measure(way);
    }
    for (enum way way = 0; way < WAYS; way++)
        qsort(time[way], (size_t)rounds, sizeof time[way][0], compare);
    if (tally_comm_rank(comm) == 0)
        printf("{\"ranks\": %d, \"bytes\": %zu, \"copies_ms\": %.4f, \"hand_ms\": %.4f, \"gpu_ms\": %.4f, "
               "\"ranks_that_differ\": %d}\n",
               tally_comm_size(comm), bytes, time[COPIES][rounds / 2], time[HAND][rounds / 2],
               time[GPU][rounds / 2], wrong);
    CHECK(tally_comm_close(comm) == 0);
    return wrong ? 1 : 0;
}
