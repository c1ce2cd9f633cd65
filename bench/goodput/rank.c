/* rank.c - see rank.h. */
#include "rank.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>

static void fail(const char *what, const char *which)
{
    fprintf(stderr, "goodput: %s %s\n", what, which);
    exit(1);
}

void *rank_allocate(size_t count, size_t size)
{
    void *p = calloc(count, size);
    if (!p)
        fail("no memory for", "the tensors");
    return p;
}

static double seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static double cpu_seconds(void)
{
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    return (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) +
           (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec) * 1e-6;
}

/* What all of the machine's processors have done: the network's emulation is in it, and the services. */
static void machine(double *busy, double *ticks)
{
    /* user, nice, system, idle, waiting for a disk, interrupts, soft interrupts */
    double t[7] = {0};
    FILE *f = fopen("/proc/stat", "r");
    if (!f ||
        fscanf(f, "cpu %lf %lf %lf %lf %lf %lf %lf", &t[0], &t[1], &t[2], &t[3], &t[4], &t[5], &t[6]) != 7)
        fail("cannot read", "/proc/stat");
    fclose(f);
    *busy = t[0] + t[1] + t[2] + t[5] + t[6];
    *ticks = *busy + t[3] + t[4];
}

/* Bytes that all cards of this machine have sent and received: of all its interfaces but loopback. */
static void cards(double *sent, double *received)
{
    char line[512], name[32];
    double in, out;
    FILE *f = fopen("/proc/net/dev", "r");
    if (!f)
        fail("cannot read", "/proc/net/dev");
    *sent = *received = 0;
    while (fgets(line, sizeof line, f))
        if (sscanf(line, " %31[^:]: %lf %*f %*f %*f %*f %*f %*f %*f %lf", name, &in, &out) == 3 &&
            strcmp(name, "lo") != 0) {
            *received += in;
            *sent += out;
        }
    fclose(f);
}

void rank_start(struct rank *r, int argc, char **argv)
{
    if (argc != 4) {
        fprintf(stderr, "usage: %s ITERATIONS WARM_UP LIST\n", argv[0]);
        exit(2);
    }
    r->iterations = atoi(argv[1]);
    r->warm_up = atoi(argv[2]);
    if (r->iterations < 1 || r->warm_up < 0)
        fail("no number of iterations:", argv[1]);
    FILE *f = fopen(argv[3], "r");
    if (!f)
        fail("cannot read", argv[3]);
    struct tensor t = {0};
    size_t room = 0;
    while (fscanf(f, "%zu %119s", &t.count, t.name) == 2) {
        if (r->count == room && !(r->tensors = realloc(r->tensors, (room = room ? 2 * room : 64) * sizeof t)))
            fail("no memory for", "the list");
        t.data = rank_allocate(t.count, sizeof *t.data);
        r->tensors[r->count++] = t;
    }
    if (!feof(f) || r->count == 0)
        fail("lines are to be \"COUNT NAME\" in", argv[3]);
    fclose(f);
    r->seconds = rank_allocate((size_t)r->iterations, sizeof *r->seconds);
    r->cpu_seconds = rank_allocate((size_t)r->iterations, sizeof *r->cpu_seconds);
}

float rank_input(int rank, size_t tensor, size_t i, int iteration)
{
    return (float)(rank + 1 + (int)((i + tensor) % 11) + iteration % 5);
}

static void fill(const struct rank *r, int iteration)
{
    for (size_t t = 0; t < r->count; t++)
        for (size_t i = 0; i < r->tensors[t].count; i++)
            r->tensors[t].data[i] = rank_input(r->number, t, i, iteration);
}

static size_t count_wrong(const struct rank *r, int iteration)
{
    size_t wrong = 0;
    float ranks = (float)(r->of * (r->of - 1)) / 2;
    for (size_t t = 0; t < r->count; t++)
        for (size_t i = 0; i < r->tensors[t].count; i++)
            wrong += r->tensors[t].data[i] != ranks + (float)r->of * rank_input(0, t, i, iteration);
    return wrong;
}

/* Have the program that started the job look at all its processes while no rank works: bench/cost does, and names the
 * beginning of two FIFOs' names in BENCH_OBSERVER. */
static void be_observed(const struct rank *r, const struct rank_calls *calls, void *user)
{
    const char *fifos = getenv("BENCH_OBSERVER");
    if (!fifos)
        return;
    calls->barrier(user);
    if (r->number == 0) {
        char name[256], word = 'x';
        snprintf(name, sizeof name, "%s.ask", fifos);
        FILE *ask = fopen(name, "w");
        snprintf(name, sizeof name, "%s.answer", fifos);
        FILE *answer = ask ? fopen(name, "r") : NULL;
        if (!answer || fwrite(&word, 1, 1, ask) != 1 || fflush(ask) != 0 || fread(&word, 1, 1, answer) != 1)
            fail("no observer answers at", name);
        fclose(ask);
        fclose(answer);
    }
    calls->barrier(user);
}

void rank_run(struct rank *r, const struct rank_calls *calls, void *user)
{
    for (int it = -r->warm_up; it < r->iterations; it++) {
        if (calls->fill)
            calls->fill(user, r, it + r->warm_up);
        else
            fill(r, it + r->warm_up);
        double sent, received, sent_then, received_then;
        cards(&sent, &received); /* others may begin while this rank still is in the barrier */
        calls->barrier(user);
        if (it >= 0)
            be_observed(r, calls, user);
        double busy, ticks, busy_then, ticks_then;
        machine(&busy, &ticks);
        double begin = seconds(), cpu = cpu_seconds();
        calls->work(user, r);
        if (it >= 0) {
            r->seconds[it] = seconds() - begin;
            r->cpu_seconds[it] = cpu_seconds() - cpu;
            machine(&busy_then, &ticks_then);
            r->busy += busy_then - busy;
            r->ticks += ticks_then - ticks;
        }
        calls->barrier(
            user); /* a rank that is done early must not take the cores from the others by looking */
        if (it >= 0)
            be_observed(r, calls, user);
        if (it >= 0) {
            cards(&sent_then, &received_then);
            r->sent += sent_then - sent;
            r->received += received_then - received;
        }
        r->wrong += calls->count_wrong ? calls->count_wrong(user, r, it + r->warm_up)
                                       : count_wrong(r, it + r->warm_up);
    }
}

static void print_list(const struct rank *r, const char *name, const double *values)
{
    printf(", \"%s\": [", name);
    for (int it = 0; it < r->iterations; it++)
        printf("%s%.6f", it ? ", " : "", values[it]);
    printf("]");
}

void rank_print(const struct rank *r, const char *report)
{
    printf(
        "{\"rank\": %d, \"wrong\": %zu, \"busy\": %.0f, \"ticks\": %.0f, \"sent\": %.0f, \"received\": %.0f",
        r->number, r->wrong, r->busy, r->ticks, r->sent, r->received);
    printf(", \"report\": %s", report ? report : "null");
    print_list(r, "seconds", r->seconds);
    print_list(r, "cpu_seconds", r->cpu_seconds);
    printf("}\n");
}

int rank_finish(struct rank *r, const char *report)
{
    rank_print(r, report);
    for (size_t t = 0; t < r->count; t++)
        free(r->tensors[t].data);
    free(r->tensors);
    free(r->seconds);
    free(r->cpu_seconds);
    return r->wrong != 0;
}
