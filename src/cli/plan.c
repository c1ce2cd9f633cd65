/* plan.c - `tally plan`: the split, the traffic and the times that src/plan predicts, for people and programs. */
#include "cli/cli.h"

#include <getopt.h>
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "plan/plan.h"

const char tly_cli_plan_usage[] =
    "usage: tally plan -n N [-k K] [-M SIZE] [-B RATE] [--json]\n"
    "\n"
    "Says how many bytes each summation service sums, what its machine sends and receives, and how\n"
    "long one exchange of all gradients takes at best, beside all-reduce and a parameter server.\n"
    "\n"
    "  -n, --workers N       worker machines\n"
    "  -k, --servers K       CPU machines that run tallyd (0)\n"
    "  -M, --bytes SIZE      gradients, in bytes or with K, M, G, T, powers of 1024 (100M)\n"
    "  -B, --bandwidth RATE  of a machine's network card each way, in bit/s or with k, M, G, T,\n"
    "                        powers of 1000 (10G)\n"
    "      --json            as JSON\n";

struct plan {
    int n, k;
    uint64_t bytes;
    double rate; /* bit/s */
    uint32_t weight[TLY_MAX_SERVICES];
    uint64_t share[TLY_MAX_SERVICES];
};

/* A positive number and one of the letters, each worth `unit` times the last. */
static double quantity(const char *text, double unit)
{
    if (*text < '0' || *text > '9') /* strtod would take blanks, signs and words */
        return -1;
    char *end = NULL;
    double x = strtod(text, &end);
    const char *letters = "kmgt", *at = *end ? strchr(letters, *end | 32) : NULL;
    if (at) {
        x *= pow(unit, (double)(at - letters) + 1);
        end++;
    }
    return *end || !(x > 0) || !(x <= 1e18) ? -1 : x;
}

/* What machine i sends, and receives, over its network card (Eq. 3, 4). */
static double traffic(const struct plan *p, int i)
{
    if (p->n == 1)
        return 0;
    return i < p->n ? (double)p->bytes + (p->n - 2) * (double)p->share[i] : p->n * (double)p->share[i];
}

static double seconds(const struct plan *p, int k)
{
    return tly_plan_time(p->n, k, (double)p->bytes, p->rate / 8);
}

/* One exchange with one more CPU machine takes less by more than rounding. */
static bool another_helps(const struct plan *p)
{
    return seconds(p, p->k + 1) < seconds(p, p->k) * (1 - 1e-9);
}

static void print_kind(const struct plan *p, const char *kind, int count, int i)
{
    char what[64];
    snprintf(what, sizeof what, "%d %s%s", count, kind, count == 1 ? "" : "s");
    printf("%-22s %16llu %8.2f%% %18.0f\n", what, (unsigned long long)p->share[i],
           100.0 * (double)p->share[i] / (double)p->bytes, traffic(p, i));
}

static void print_text(const struct plan *p)
{
    double t = seconds(p, p->k), b = p->rate / 8, m = (double)p->bytes;
    double reduce = tly_plan_time_all_reduce(p->n, m, b), server = tly_plan_time_server(p->n, p->k, m, b);
    printf("%llu bytes, network cards of %g Gbit/s each way\n\n", (unsigned long long)p->bytes,
           p->rate / 1e9);
    printf("%-22s %16s %9s %18s\n", "", "each sums, bytes", "share", "each way, bytes");
    print_kind(p, "worker machine", p->n, 0);
    if (p->k > 0)
        print_kind(p, "CPU machine", p->k, p->n);
    if (p->n == 1) {
        printf("\none worker machine: nothing crosses the network\n");
        return;
    }
    printf("\n%-22s %14.6f s\n", "Tally", t);
    printf("%-22s %14.6f s  %.3f times as long\n", "all-reduce", reduce, reduce / t);
    if (p->k > 0)
        printf("%-22s %14.6f s  %.3f times as long\n", "parameter server", server, server / t);
    else
        printf("%-22s %14s    has no machines\n", "parameter server", "-");
    if (p->n == 2)
        printf("\nbetween two worker machines no CPU machine brings anything\n");
    else if (another_helps(p))
        printf("\none more CPU machine: %.6f s, %.1f%% less\n", seconds(p, p->k + 1),
               100 * (1 - seconds(p, p->k + 1) / t));
    else
        printf("\none more CPU machine brings nothing\n");
}

static void print_number(const char *name, double x, const char *end)
{
    if (isfinite(x))
        printf("  \"%s\": %.12g%s\n", name, x, end);
    else
        printf("  \"%s\": null%s\n", name, end);
}

static void print_json(const struct plan *p)
{
    double t = seconds(p, p->k), b = p->rate / 8, m = (double)p->bytes;
    double reduce = tly_plan_time_all_reduce(p->n, m, b), server = tly_plan_time_server(p->n, p->k, m, b);
    printf("{\n  \"n\": %d,\n  \"k\": %d,\n  \"bytes\": %llu,\n", p->n, p->k, (unsigned long long)p->bytes);
    print_number("bandwidth_bits_per_s", p->rate, ",");
    printf("  \"services\": [\n");
    for (int i = 0; i < p->n + p->k; i++)
        printf("    {\"kind\": \"%s\", \"weight\": %u, \"bytes\": %llu, \"each_way_bytes\": %.0f}%s\n",
               i < p->n ? "worker" : "cpu", p->weight[i], (unsigned long long)p->share[i], traffic(p, i),
               i + 1 < p->n + p->k ? "," : "");
    printf("  ],\n");
    print_number("time_s", t, ",");
    print_number("all_reduce_time_s", reduce, ",");
    print_number("server_time_s", p->n == 1 ? NAN : server, ",");
    print_number("gamma_a", t > 0 ? reduce / t : NAN, ",");
    print_number("gamma_p", t > 0 ? server / t : NAN, ",");
    print_number("one_more_time_s", seconds(p, p->k + 1), ",");
    printf("  \"one_more_helps\": %s\n}\n", another_helps(p) ? "true" : "false");
}

int tly_cli_plan(int argc, char **argv)
{
    static const struct option options[] = {
        {"workers", required_argument, NULL, 'n'},
        {"servers", required_argument, NULL, 'k'},
        {"bytes", required_argument, NULL, 'M'},
        {"bandwidth", required_argument, NULL, 'B'},
        {"json", no_argument, NULL, 'j'},
        {"help", no_argument, NULL, 'h'},
        {0}};
    struct plan p = {.bytes = 100 << 20, .rate = 10e9};
    bool json = false;
    double x;
    for (int c; (c = getopt_long(argc, argv, "+n:k:M:B:h", options, NULL)) != -1;) {
        switch (c) {
        case 'n':
            if ((p.n = (int)tly_cli_number(optarg, 1, TLY_MAX_SERVICES)) < 0)
                return tly_cli_misuse("plan", "-n %s: the number of worker machines is 1 to %d", optarg,
                                      TLY_MAX_SERVICES);
            break;
        case 'k':
            if ((p.k = (int)tly_cli_number(optarg, 0, TLY_MAX_SERVICES)) < 0)
                return tly_cli_misuse("plan", "-k %s: the number of CPU machines is 0 to %d", optarg,
                                      TLY_MAX_SERVICES);
            break;
        case 'M':
            if ((x = quantity(optarg, 1024)) < 1)
                return tly_cli_misuse("plan", "-M %s is no size, such as 100M", optarg);
            p.bytes = (uint64_t)x;
            break;
        case 'B':
            if ((p.rate = quantity(optarg, 1000)) < 0)
                return tly_cli_misuse("plan", "-B %s is no rate in bit/s above 0, such as 25G", optarg);
            break;
        case 'j':
            json = true;
            break;
        case 'h':
            fputs(tly_cli_plan_usage, stdout);
            return 0;
        default:
            return CLI_USAGE;
        }
    }
    if (optind < argc)
        return tly_cli_misuse("plan", "unexpected argument %s", argv[optind]);
    if (!p.n)
        return tly_cli_misuse("plan", "-n, the number of worker machines, is needed");
    if (tly_plan_weights(p.n, p.k, p.weight) < 0)
        return tly_cli_misuse("plan", "-n %d -k %d: at most %d machines in all", p.n, p.k, TLY_MAX_SERVICES);
    tly_plan_shares(p.n + p.k, p.weight, p.bytes, p.share);
    if (json)
        print_json(&p);
    else
        print_text(&p);
    return 0;
}
