/* param.h - the one table of settings: environment variables, configuration file, `tally params` and
 * tally-params(7) all come from it. */
#ifndef TLY_PARAM_H
#define TLY_PARAM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

/* X(NAME, type, field, default, min, max, agreed, help)
 * type: STR (char *, owned, NULL when unset), INT (int64_t), SIZE (uint64_t bytes, written with or without
 * K M G T, powers of 1024), RATE (uint64_t bit/s, k M G T, powers of 1000, 0 when unset), SECS (double seconds).  agreed: ranks compare a digest of these when they join.
 * STR: min/max are ignored.  What a value must hold besides (one of a few words, a multiple of 64, never to be
 * shown) stands in the rules of param.c. */
/* clang-format off */
#define TLY_PARAM_TABLE(X) \
    X(TALLY_CONFIG, STR, config, NULL, 0, 0, 0, "configuration file of NAME=value lines") \
    X(TALLY_COORD, STR, coord, NULL, 0, 0, 0, "coordinator, HOST or HOST:PORT; default MASTER_ADDR") \
    X(TALLY_COORD_FROM, STR, coord_from, NULL, 0, 0, 0, "for launchers: the setting that TALLY_COORD comes from, as errors name it") \
    X(TALLY_RANK, STR, rank, NULL, 0, 0, 0, "for launchers: RANK/SIZE, which replaces the launcher's variables for these") \
    X(TALLY_BESIDE, INT, beside, 0, 0, 1, 0, "for launchers: 1: the launcher's counts are another job's, of its ranks on this machine and of its restarts") \
    X(TALLY_PORT, INT, port, 29777, 1, 65535, 0, "coordinator's port if TALLY_COORD has none") \
    X(TALLY_PORTS, STR, ports, NULL, 0, 0, 0, "range A-B of ports at which processes listen; default any") \
    X(TALLY_IFACE, STR, iface, NULL, 0, 0, 0, "interfaces to use: names, CIDRs, ^exclusions, by comma") \
    X(TALLY_JOB, STR, job, NULL, 0, 0, 0, "job's name; default TORCHELASTIC_RUN_ID (not \"none\"), SLURM_JOB_ID, \"default\"; for a tallyd: any") \
    X(TALLY_SERVERS, INT, servers, 0, 0, 1000, 0, "number of tallyd to expect") \
    X(TALLY_SERVERS_TIMEOUT, SECS, servers_timeout, 30, 0, 86400, 0, "time for which the start waits for missing tallyd after the last rank") \
    X(TALLY_SECRET, STR, secret, NULL, 0, 0, 0, "job secret") \
    X(TALLY_SECRET_FILE, STR, secret_file, NULL, 0, 0, 0, "file of mode 0600 that holds the job secret") \
    X(TALLY_HOST_ID, STR, host_id, NULL, 0, 0, 0, "identity of this machine; default the boot id") \
    X(TALLY_JOIN_TIMEOUT, SECS, join_timeout, 600, 1, 86400, 0, "time for which the start waits for missing ranks") \
    X(TALLY_DEAD_TIMEOUT, SECS, dead_timeout, 30, 1, 86400, 0, "time after which a silent rank counts as dead") \
    X(TALLY_TIMEOUT, SECS, timeout, 1800, 0, 1e9, 0, "time after which a waiting operation fails the job; 0: never") \
    X(TALLY_ABORT, INT, abort, 1, 0, 1, 0, "1: an exception that ends a Python program, or a thread of it that has called Tally, ends the job, and all ranks hear it; 0: tally_comm_abort() does nothing") \
    X(TALLY_LATE_WARNING, SECS, late_warning, 60, 0.1, 1e9, 0, "time until the first warning about a late rank; repeated at each doubling") \
    X(TALLY_PART_BYTES, SIZE, part_bytes, 0, 4096, 67108864, 1, "size of the largest part of a tensor; default what the network cards send in 0.5 ms on average, weighted by their traffic, 32K to 512K; up to 512K in a long tensor that is in no list of several") \
    X(TALLY_FRAGMENT_BYTES, SIZE, fragment_bytes, 0, 4096, 262144, 0, "bytes of a part that must have come from all ranks before they are summed and sent on; default half a part, 64K to 128K") \
    X(TALLY_CREDIT_BYTES, SIZE, credit_bytes, 0, 0, 1ull << 40, 0, "limit of bytes that are sent and not yet accepted, in all; 0: 2 parts for each active service; for all-reduces 3 where no machine with ranks sums, and at least 12 short ones; any other value keeps parts short") \
    X(TALLY_WINDOW_PARTS, INT, window_parts, 0, 0, 1000000, 1, "short parts that a rank may have unanswered at a service; 0: enough for twice the credit, or the service's share of 512 parts up to 32 MB, if memory lasts; any other value keeps parts short") \
    X(TALLY_MEMORY, SIZE, memory, 0, 0, 1ull << 50, 0, "most memory that a service takes; 0: half of what the machine or cgroup allows") \
    X(TALLY_CHECKSUM, INT, checksum, 0, 0, 1, 1, "1: every payload over TCP carries a checksum, so that altered bytes are found") \
    X(TALLY_RETAIN_BYTES, SIZE, retain_bytes, 4194304, 0, 1ull << 40, 0, "most bytes of an operation's result, summed by a tallyd, that are copied aside at its end until all ranks have them") \
    X(TALLY_RETAIN_MEMORY, SIZE, retain_memory, 67108864, 0, 1ull << 40, 0, "memory for all such copies on each machine") \
    X(TALLY_BANDWIDTH, RATE, bandwidth, 0, 1e3, 1e15, 0, "bandwidth of this machine's network card each way, in bit/s; default what the card says, else measured") \
    X(TALLY_MEASURE, STR, measure, "unknown", 0, 0, 0, "network cards to measure when the job starts: unknown: those of unknown speed; all; off: none; the coordinator's value counts: rank 0's, or tallyd --coordinator's") \
    X(TALLY_MEASURED, STR, measured, NULL, 0, 0, 0, "for tests: HOST=RATE,... counts as measured, with a ? behind it once; nothing is measured then") \
    X(TALLY_SUM_RATE, RATE, sum_rate, 0, 1e3, 1e15, 0, "most that this machine's service can add, in bit/s of inputs; default no limit") \
    X(TALLY_SPLIT, STR, split, "optimal", 0, 0, 1, "machines that sum: all, for the least time; for comparison the ranks' machines only, or tallyd only") \
    X(TALLY_REPLAN, INT, replan, 1, 0, 1, 0, "1: the split follows what network cards and services are seen to carry; 0: it stays; the coordinator's value counts: rank 0's, or tallyd --coordinator's") \
    X(TALLY_SUM_THREADS, INT, sum_threads, -1, -1, 1024, 0, "threads that sum, besides the network thread; -1: by the number of cores") \
    X(TALLY_GPU_GROUP, INT, gpu_group, 0, 0, 8, 1, "ranks of a machine in a row that sum on their GPUs before the host does: 1 (none), 2, 4 or 8; 0: as `tally topo` says") \
    X(TALLY_TOPO, STR, topo, NULL, 0, 0, 0, "file that says what this machine is: hwloc's XML, as for `tally topo --xml`; default what is found") \
    X(TALLY_TOPO_LINKS, STR, topo_links, NULL, 0, 0, 0, "links file with more facts on it, as for `tally topo --links`") \
    X(TALLY_DEVICE_MEMORY, SIZE, device_memory, 268435456, 65536, 1ull << 40, 0, "pinned memory in which a rank stages the tensors of each GPU") \
    X(TALLY_SHM, INT, shm, 1, 0, 1, 0, "1: payloads between processes of one machine are in shared memory; 0: they go over TCP") \
    X(TALLY_RDMA, INT, rdma, 1, 0, 1, 0, "1: payloads between machines go by RDMA where both have a device for it; 0: they go over TCP") \
    X(TALLY_RDMA_DEVICE, STR, rdma_device, NULL, 0, 0, 0, "RDMA device to use, as ibv_devices names it; default the one with a GID for the address that TCP uses; needed on InfiniBand") \
    X(TALLY_RDMA_GID, INT, rdma_gid, -1, -1, 255, 0, "index of the GID to use; -1: that of RoCE v2 for the address that TCP uses") \
    X(TALLY_RDMA_CLASS, INT, rdma_class, 0, 0, 255, 0, "traffic class of RDMA packets, by which switches tell lossless traffic") \
    X(TALLY_LOCAL, STR, local, "on", 0, 0, 1, "ranks of one machine sum in shared memory: on or off") \
    X(TALLY_TRACE, STR, trace, NULL, 0, 0, 0, "write a timeline to this name (for FOLDER/: FOLDER/tally) and .START.rank-I.json or .START.service-I-LIFE.json; see docs/trace.md") \
    X(TALLY_TRACE_BYTES, SIZE, trace_bytes, 16777216, 65536, 1ull << 36, 0, "memory for the timeline in each process, 32 bytes a stamp; new stamps overwrite the oldest") \
    X(TALLY_SHARED_LOG, STR, shared_log, NULL, 0, 0, 0, "for tests: services write each addition to a shared tensor, and each answer, to this name and .PID") \
    X(TALLY_LOG, STR, log, "info", 0, 0, 0, "least urgent level to log, or off") \
    X(TALLY_LIBRARY, STR, library, NULL, 0, 0, 0, "path of libtally.so for the Python package")
/* clang-format on */

struct tly_params {
#define TLY_FIELD_STR(f) char *f;
#define TLY_FIELD_INT(f) int64_t f;
#define TLY_FIELD_SIZE(f) uint64_t f;
#define TLY_FIELD_RATE(f) uint64_t f;
#define TLY_FIELD_SECS(f) double f;
#define TLY_FIELD(name, type, field, ...) TLY_FIELD_##type(field)
    TLY_PARAM_TABLE(TLY_FIELD)
#undef TLY_FIELD
};

/* Fill from, in falling order of precedence: `settings` (NULL or NULL-terminated "NAME=value"), environment,
 * configuration file, defaults.  An empty value stands for the default.  Unknown TALLY_* names and values out of range are
 * refused: -EINVAL and a sentence in `why` that names the variable, the value (a secret's never) and what is
 * valid (a near-miss gets "did you mean").  Also -ENOMEM, and what opening the configuration file gives.
 * p is to be finished in the end after success only. */
int tly_params_load(struct tly_params *p, const char *const settings[], char *why, size_t why_len);
/* Frees the strings; also fine on a struct of zeros. */
void tly_params_finish(struct tly_params *p);

/* The release of this build; a test pretends to be another. */
extern const char *tly_release;

/* Hash of what ranks must have in common, the same on every machine and build: the release but for its patch, and the
 * agreed settings; and their text ("Tally 0.1 TALLY_PART_BYTES=524288 TALLY_WINDOW_PARTS=4") for the error.  The text
 * returns its length like snprintf. */
uint64_t tly_params_digest(const struct tly_params *p);
int tly_params_agreed_text(const struct tly_params *p, char *buf, size_t len);

/* The decimal digits at *text, with `point` also a fraction, and *text moved behind them; false where there are none.
 * No sign, blank or exponent, and whatever the application's locale.  Whole numbers are exact to 2^53. */
bool tly_digits(const char **text, bool point, double *number);

/* --- param_print.c, for the command alone ----------------------------------------------------------- */

/* The table, for `tally params`: as a table, JSON or troff (the man page).  With the values in force if p, else
 * with the defaults.  Secrets show as "(set)". */
enum tly_params_format { TLY_PARAMS_TABLE, TLY_PARAMS_JSON, TLY_PARAMS_TROFF };
void tly_params_print(FILE *out, const struct tly_params *p, enum tly_params_format format);

/* `s` as a JSON string, with its quotes. */
void tly_json_text(FILE *out, const char *s);

#endif
