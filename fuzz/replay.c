/* replay.c - runs a fuzz target without a fuzzing engine: over its seeds, and for some seconds over changed seeds.
 * Speaks TAP: one test a seed, and one for all changed ones.
 *
 *   replay_NAME CORPUS [SECONDS LAST]
 *
 * The input under way is in the file LAST, which outlives only a failure.  libFuzzer (`make fuzz`) also knows which code an
 * input reaches, and takes a compiler and a build of its own. */
#include <dirent.h>
#include <fcntl.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "fuzz.h"

struct input {
    uint8_t *data;
    size_t size;
};

enum { MOST_SEEDS = 256, MOST_BYTES = 4096, MOST_CHANGES = 6 };

static struct input seeds[MOST_SEEDS];
static size_t seed_count;
static int tests;

/* The target gets memory exactly as large as the input, so that a read beyond it is noticed. */
static uint8_t *allocate(size_t size)
{
    uint8_t *data = malloc(size > 0 ? size : 1);
    require(data != NULL);
    return data;
}

static void replay_file(const char *folder, const char *name)
{
    char path[4096];
    require(snprintf(path, sizeof path, "%s/%s", folder, name) < (int)sizeof path);
    FILE *file = fopen(path, "rb");
    require(file != NULL && fseek(file, 0, SEEK_END) == 0);
    long size = ftell(file);
    require(size >= 0 && seed_count < MOST_SEEDS);
    rewind(file);
    struct input *seed = &seeds[seed_count++];
    *seed = (struct input){allocate((size_t)size), (size_t)size};
    require(fread(seed->data, 1, seed->size, file) == seed->size);
    fclose(file);
    LLVMFuzzerTestOneInput(seed->data, seed->size);
    printf("ok %d - %s\n", ++tests, name);
}

static void replay(const char *folder)
{
    struct dirent **entries;
    int n = scandir(folder, &entries, NULL, alphasort);
    require(n >= 0);
    for (int i = 0; i < n; i++) {
        if (entries[i]->d_name[0] != '.')
            replay_file(folder, entries[i]->d_name);
        free(entries[i]);
    }
    free(entries);
}

static uint64_t random_state;

/* splitmix64: less than `end`, or 0 */
static size_t below(size_t end)
{
    uint64_t x = random_state += 0x9e3779b97f4a7c15;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
    x = (x ^ x >> 27) * 0x94d049bb133111eb;
    x ^= x >> 31;
    return end > 0 ? x % end : 0;
}

/* Replace `old` bytes at `at` by the `new` bytes at `with`, as far as there is room. */
static void replace(struct input *in, size_t at, size_t old, const uint8_t *with, size_t new)
{
    if (old > in->size - at)
        old = in->size - at;
    if (new > MOST_BYTES - (in->size - old))
        new = MOST_BYTES - (in->size - old);
    memmove(in->data + at + new, in->data + at + old, in->size - at - old);
    memcpy(in->data + at, with, new);
    in->size += new - old;
}

/* Bounds of types, what is next to them, and what means something in a text. */
static void put_number(struct input *in, size_t at)
{
    static const char *const texts[] = {"0", "-1", "1e308", "nan", "18446744073709551616", "\n", " ", "{",
                                        "]", "\"", ",",     "%"};
    if (below(2)) {
        const char *text = texts[below(sizeof texts / sizeof *texts)];
        replace(in, at, below(3), (const uint8_t *)text, strlen(text));
    } else {
        uint64_t bits = (below(2) ? 0 : UINT64_MAX >> below(64)) + below(3) - 1;
        size_t size = (size_t)1 << below(4);
        replace(in, at, size, (const uint8_t *)&bits, size);
    }
}

static void change(struct input *in)
{
    const struct input *other = &seeds[below(seed_count)];
    size_t at = below(in->size + 1), from = below(other->size),
           size = below(2) ? below(8) : below(other->size - from + 1);
    uint8_t byte = (uint8_t)below(256), copy[MOST_BYTES];
    switch (below(6)) {
    case 0:
        if (at < in->size)
            in->data[at] ^= (uint8_t)(1 << below(8));
        break;
    case 1:
        replace(in, at, below(2), &byte, 1);
        break;
    case 2:
        put_number(in, at);
        break;
    case 3: /* take some out */
        replace(in, at, below(2) ? below(8) : below(in->size + 1), copy, 0);
        break;
    case 4: /* a piece of a seed, in or over the place */
        if (size > other->size - from)
            size = other->size - from;
        replace(in, at, below(2) ? size : 0, other->data + from, size);
        break;
    default: /* a piece of its own once more */
        from = below(in->size + 1);
        size = below(in->size - from + 1);
        memcpy(copy, in->data + from, size);
        replace(in, at, below(2) ? size : 0, copy, size);
        break;
    }
}

static void fuzz(double seconds, const char *last)
{
    static uint8_t bytes[MOST_BYTES];
    struct timespec begin, now;
    unsigned long inputs = 0;
    int fd = open(last, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    require(fd >= 0 && clock_gettime(CLOCK_MONOTONIC, &begin) == 0);
    random_state = (uint64_t)begin.tv_sec * 1000000000 + (uint64_t)begin.tv_nsec;
    printf("# the input that fails is in %s\n", last);
    do {
        const struct input *seed = &seeds[below(seed_count)];
        struct input in = {bytes, seed->size < MOST_BYTES ? seed->size : MOST_BYTES};
        memcpy(bytes, seed->data, in.size);
        for (size_t left = 1 + below(MOST_CHANGES); left > 0; left--)
            change(&in);
        uint8_t *data = allocate(in.size);
        memcpy(data, bytes, in.size);
        require(pwrite(fd, data, in.size, 0) == (ssize_t)in.size && ftruncate(fd, (off_t)in.size) == 0);
        LLVMFuzzerTestOneInput(data, in.size);
        free(data);
        inputs++;
        clock_gettime(CLOCK_MONOTONIC, &now);
    } while ((double)(now.tv_sec - begin.tv_sec) + (double)(now.tv_nsec - begin.tv_nsec) / 1e9 < seconds);
    close(fd);
    unlink(last);
    printf("ok %d - %lu changed seeds\n", ++tests, inputs);
}

int main(int argc, char **argv)
{
    setvbuf(stdout, NULL, _IOLBF, 0); /* what passed shows even if the next one crashes */
    require(argc == 2 || argc == 4);
    replay(argv[1]);
    require(seed_count > 0);
    if (argc == 4)
        fuzz(atof(argv[2]), argv[3]);
    for (size_t i = 0; i < seed_count; i++)
        free(seeds[i].data);
    printf("1..%d\n", tests);
    return 0;
}
