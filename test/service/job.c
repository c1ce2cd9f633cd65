/* job.c - starting, watching and ending the processes of a test's jobs. */
#include "job.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <setjmp.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>

#include "comm/comm.h"
#include "local/engine.h"
#include "local/segment.h"

#include <cmocka.h>

/* Longer than anything a test waits for, also under a sanitizer on a busy machine: who is not there by then hangs. */
enum { PATIENCE_S = 150, LONGEST_LOG = 1 << 20 };

static pid_t test_pid; /* of the test program; anything else is a rank */

/* --- in ranks ------------------------------------------------------------------------------------ */

void rank_fails(const char *file, int line, const char *what)
{
    fprintf(stderr, "%s:%d: not so: %s (last error: %s)\n", file, line, what, tally_error());
    fflush(stderr);
    _exit(99);
}

void rank_must_hold(const char *file, int line, const char *text, const char *part)
{
    if (strstr(text, part))
        return;
    fprintf(stderr, "%s:%d: \"%s\" is not in \"%s\"\n", file, line, part, text);
    fflush(stderr);
    _exit(99);
}

void job_forbid_reaching(void)
{
    struct sock_filter rules[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_process_vm_readv, 1, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_process_vm_writev, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {.len = sizeof rules / sizeof *rules, .filter = rules};
    CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    CHECK(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0);
}

bool job_move_apart(int rank)
{
    cpu_set_t all, one;
    int nth = 0;
    CHECK(sched_getaffinity(0, sizeof all, &all) == 0);
    if (CPU_COUNT(&all) < 2)
        return false;
    CPU_ZERO(&one);
    for (int cpu = 0; cpu < CPU_SETSIZE && !CPU_COUNT(&one); cpu++)
        if (CPU_ISSET(cpu, &all) && nth++ == rank % 2)
            CPU_SET(cpu, &one);
    CHECK(sched_setaffinity(0, sizeof one, &one) == 0);
    CHECK(setenv("HWLOC_SYNTHETIC", "numa:1024 core:1 pu:1", 1) == 0 &&
          setenv("HWLOC_THISSYSTEM", "1", 1) == 0);
    return true;
}

enum { LITTLE_POOL = 96 << 20 };

void job_limit_pool(void)
{
    static const struct rlimit little = {LITTLE_POOL, LITTLE_POOL};
    CHECK(setrlimit(RLIMIT_FSIZE, &little) == 0);
}

void job_fill_pool(tally_comm *c)
{
    void *at;
    for (uint64_t bytes = LITTLE_POOL; bytes >= TLY_PAGE;)
        if (tly_pool_borrow(c->local->segment, bytes, &at) != 0)
            bytes /= 2;
}

size_t job_resident(void)
{
    unsigned long all, pages = 0;
    FILE *f = fopen("/proc/self/statm", "re");
    CHECK(f && fscanf(f, "%lu %lu", &all, &pages) == 2);
    fclose(f);
    return pages * (size_t)sysconf(_SC_PAGESIZE);
}

void job_sleep_ms(int ms)
{
    struct timespec t = {.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000l};
    nanosleep(&t, NULL);
}

void job_await(atomic_int *value, int target)
{
    for (int i = 0; atomic_load(value) < target; i++) {
        if (i > PATIENCE_S * 500) {
            if (getpid() != test_pid)
                rank_fails(__FILE__, __LINE__, "the others come in time");
            fail_msg("a rank did not come to stage %d", target);
        }
        job_sleep_ms(2);
    }
}

void *job_shared(size_t bytes)
{
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_ptr_not_equal(p, MAP_FAILED);
    return p;
}

uint64_t job_hash(const void *data, size_t len)
{
    uint64_t h = 0xcbf29ce484222325ull ^ len, word = 0;
    const uint8_t *p = data;
    for (; len >= 8; p += 8, len -= 8) {
        memcpy(&word, p, 8);
        h = (h ^ word) * 0x100000001b3ull;
        h ^= h >> 29;
    }
    for (; len; p++, len--)
        h = (h ^ *p) * 0x100000001b3ull;
    return h | 1; /* never 0 */
}

int job_long(void)
{
    const char *choice = getenv("TEST_LONG");
    return !choice || strcmp(choice, "none") == 0 ? 0 : strcmp(choice, "all") == 0 ? JOB_ALL : atoi(choice);
}

/* --- starting ------------------------------------------------------------------------------------ */

int job_free_port(void)
{
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof a;
    assert_true(fd >= 0 && bind(fd, (struct sockaddr *)&a, sizeof a) == 0);
    assert_int_equal(getsockname(fd, (struct sockaddr *)&a, &len), 0);
    /* Stays bound to the end of the program, so that no other test beside it is given the same one.  Who sets
     * SO_REUSEADDR may listen there. */
    assert_int_equal(setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &(int){1}, sizeof(int)), 0);
    return ntohs(a.sin_port);
}

static void log_path(const struct job *j, int index, char *out, size_t len)
{
    snprintf(out, len, "%s/%s%d", j->folder, index < JOB_MOST_RANKS ? "rank" : "tallyd",
             index % JOB_MOST_RANKS);
}

static void set_number(const char *name, int value)
{
    char text[16];
    snprintf(text, sizeof text, "%d", value);
    setenv(name, text, 1);
}

/* In the new process. */
static void become(struct job *j, int index)
{
    char path[128];
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    log_path(j, index, path, sizeof path);
    int fd = open(path, O_WRONLY | O_CREAT | O_APPEND, 0600);
    if (fd < 0 || dup2(fd, STDERR_FILENO) < 0 || dup2(fd, STDOUT_FILENO) < 0)
        _exit(98);
    close(fd);
    setvbuf(stderr, NULL, _IOLBF, 4096); /* a line at a time, or ranks' lines and a sanitizer's mix */
    for (char **e = environ; *e;) {
        char name[64];
        snprintf(name, sizeof name, "%.*s", (int)strcspn(*e, "="), *e);
        if (strncmp(name, "TALLY_", 6) == 0)
            unsetenv(name);
        else
            e++;
    }
    snprintf(path, sizeof path, "127.0.0.1:%d", j->port);
    setenv("TALLY_COORD", path, 1);
    setenv("XDG_CONFIG_HOME", j->folder, 1);
    snprintf(path, sizeof path, "m%d",
             index >= JOB_MOST_RANKS ? 1000 + index
             : j->machine            ? j->machine[index]
                                     : index);
    setenv("TALLY_HOST_ID", path, 1);
    if (j->tallyds)
        set_number("TALLY_SERVERS", j->tallyds);
    for (const char *const *s = j->settings; *s; s++) {
        char text[256];
        snprintf(text, sizeof text, "%s", *s);
        char *eq = strchr(text, '=');
        *eq = '\0';
        setenv(text, eq + 1, 1);
    }
}

static void start(struct job *j, int index)
{
    fflush(NULL);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        become(j, index);
        if (index < JOB_MOST_RANKS) {
            set_number("RANK", index);
            set_number("WORLD_SIZE", j->ranks);
            exit(j->main(index, j->arg));
        }
        const char *program = getenv("TEST_TALLYD");
        const char *argv[8] = {"tallyd", j->tallyd_stays ? NULL : "--once"};
        for (int i = 0, at = j->tallyd_stays ? 1 : 2; i < 4 && j->tallyd_options[i]; i++)
            argv[at++] = j->tallyd_options[i];
        execv(program ? program : "tallyd", (char *const *)argv);
        perror("tallyd (TEST_TALLYD names it)");
        _exit(97);
    }
    if (index < JOB_MOST_RANKS) {
        j->rank_pid[index] = pid;
        j->rank_status[index] = -1;
    } else {
        j->tallyd_pid[index - JOB_MOST_RANKS] = pid;
        j->tallyd_status[index - JOB_MOST_RANKS] = -1;
    }
}

void job_start_rank(struct job *j, int rank)
{
    start(j, rank);
}

void job_start_tallyd(struct job *j, int index)
{
    start(j, JOB_MOST_RANKS + index);
}

void job_start(struct job *j)
{
    test_pid = getpid();
    const char *tmp = getenv("TMPDIR");
    snprintf(j->folder, sizeof j->folder, "%.40s/tally-test-XXXXXX", tmp ? tmp : "/tmp");
    assert_non_null(mkdtemp(j->folder));
    if (!j->port)
        j->port = job_free_port();
    for (int i = 0; i < j->tallyds; i++)
        job_start_tallyd(j, i);
    for (int i = 0; i < (j->start_first ? j->start_first : j->ranks); i++)
        job_start_rank(j, i);
}

pid_t job_start_coordinator(int port)
{
    char at[32];
    snprintf(at, sizeof at, "127.0.0.1:%d", port);
    fflush(NULL);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        const char *program = getenv("TEST_TALLYD");
        execl(program ? program : "tallyd", "tallyd", "--coordinator", "--coord", at, (char *)NULL);
        _exit(97);
    }
    struct sockaddr_in to = {.sin_family = AF_INET,
                             .sin_port = htons((uint16_t)port),
                             .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    for (int i = 0, there = 0; !there; i++) { /* or rank 0 would take its place */
        int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        there = connect(fd, (struct sockaddr *)&to, sizeof to) == 0;
        close(fd);
        assert_true(i < 20000);
        job_sleep_ms(5);
    }
    return pid;
}

/* --- ending -------------------------------------------------------------------------------------- */

const char *job_log(const struct job *j, int index)
{
    static char text[LONGEST_LOG];
    char path[128];
    log_path(j, index, path, sizeof path);
    FILE *f = fopen(path, "re");
    size_t n = f ? fread(text, 1, sizeof text - 1, f) : 0;
    text[n] = '\0';
    if (f)
        fclose(f);
    return text;
}

static void show(const struct job *j, int index)
{
    const char *text = job_log(j, index);
    size_t len = strlen(text);
    print_message("# --- %s %d ---\n", index < JOB_MOST_RANKS ? "rank" : "tallyd", index % JOB_MOST_RANKS);
    for (const char *line = text + (len > 6000 ? len - 6000 : 0); *line; line += strcspn(line, "\n") + 1) {
        print_message("# %.*s\n", (int)strcspn(line, "\n"), line);
        if (!line[strcspn(line, "\n")])
            break;
    }
}

static void show_all(const struct job *j)
{
    for (int i = 0; i < j->ranks; i++)
        show(j, i);
    for (int i = 0; i < j->tallyds; i++)
        show(j, JOB_MOST_RANKS + i);
}

static void fail_job(struct job *j, const char *what)
{
    show_all(j);
    job_clear(j);
    fail_msg("%s", what);
}

static int ended(int status)
{
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

static int wait_one(struct job *j, pid_t pid, int *status, const char *what, int index)
{
    char text[100];
    for (int i = 0; *status == -1; i++) {
        int s;
        pid_t r = waitpid(pid, &s, WNOHANG);
        if (r == pid) {
            *status = s;
        } else if (i > PATIENCE_S * 500) {
            snprintf(text, sizeof text, "%s %d hangs", what, index);
            fail_job(j, text);
        } else {
            job_sleep_ms(2);
        }
    }
    return ended(*status);
}

int job_wait_rank(struct job *j, int rank)
{
    return wait_one(j, j->rank_pid[rank], &j->rank_status[rank], "rank", rank);
}

int job_wait_tallyd(struct job *j, int index)
{
    return wait_one(j, j->tallyd_pid[index], &j->tallyd_status[index], "tallyd", index);
}

void job_finish(struct job *j)
{
    char text[100];
    /* Whoever fails first ends the wait for the others. */
    for (int left = 1, i = 0; left; i++) {
        left = 0;
        for (int r = 0; r < j->ranks; r++) {
            int s;
            if (j->rank_pid[r] && j->rank_status[r] == -1 &&
                waitpid(j->rank_pid[r], &s, WNOHANG) == j->rank_pid[r])
                j->rank_status[r] = s;
            if (j->rank_pid[r] && j->rank_status[r] == -1)
                left++;
            else if (j->rank_pid[r] && j->rank_status[r] != 0) {
                snprintf(text, sizeof text, "rank %d ends with status %d", r, ended(j->rank_status[r]));
                fail_job(j, text);
            }
        }
        if (i > PATIENCE_S * 500)
            fail_job(j, "the job hangs");
        if (left)
            job_sleep_ms(2);
    }
    for (int t = 0; t < j->tallyds && !j->tallyd_stays; t++)
        if (j->tallyd_pid[t] && job_wait_tallyd(j, t) != 0) {
            snprintf(text, sizeof text, "tallyd %d ends with status %d", t, ended(j->tallyd_status[t]));
            fail_job(j, text);
        }
}

void job_clear(struct job *j)
{
    for (int i = 0; i < JOB_MOST_RANKS; i++)
        if (j->rank_pid[i] && j->rank_status[i] == -1) {
            kill(j->rank_pid[i], SIGKILL);
            waitpid(j->rank_pid[i], &j->rank_status[i], 0);
        }
    for (int i = 0; i < JOB_MOST_TALLYDS; i++)
        if (j->tallyd_pid[i] && j->tallyd_status[i] == -1) {
            kill(j->tallyd_pid[i], SIGKILL);
            waitpid(j->tallyd_pid[i], &j->tallyd_status[i], 0);
        }
    for (int i = 0; i < JOB_MOST_RANKS + JOB_MOST_TALLYDS; i++) {
        char path[128];
        log_path(j, i, path, sizeof path);
        unlink(path);
    }
    rmdir(j->folder);
}

void job_log_holds(const struct job *j, int index, const char *part)
{
    if (!strstr(job_log(j, index), part)) {
        show_all(j);
        fail_msg("%s %d does not say \"%s\"", index < JOB_MOST_RANKS ? "rank" : "tallyd",
                 index % JOB_MOST_RANKS, part);
    }
}

void job_log_lacks(const struct job *j, int index, const char *part)
{
    if (strstr(job_log(j, index), part)) {
        show_all(j);
        fail_msg("%s %d says \"%s\"", index < JOB_MOST_RANKS ? "rank" : "tallyd", index % JOB_MOST_RANKS,
                 part);
    }
}

void job_run(struct job *j)
{
    job_start(j);
    job_finish(j);
    job_clear(j);
}

static void kill_one(struct job *j, pid_t *pid, atomic_int *stage, int at)
{
    job_start(j);
    job_await(stage, at);
    kill(*pid, SIGKILL);
    for (int rank = 0; rank < j->ranks; rank++) {
        int expected = pid == &j->rank_pid[rank] ? 128 + SIGKILL : 0;
        if (job_wait_rank(j, rank) != expected) {
            char text[60];
            snprintf(text, sizeof text, "rank %d does not end with status %d", rank, expected);
            fail_job(j, text);
        }
    }
    job_clear(j);
}

void job_kill_rank(struct job *j, int rank, atomic_int *stage, int at)
{
    kill_one(j, &j->rank_pid[rank], stage, at);
}

void job_close_after_kill(tally_comm *c, int err, int killed, void *result, size_t bytes)
{
    char part[20];
    snprintf(part, sizeof part, "rank %d on", killed);
    if (err) {
        CHECK(err == -ECONNRESET);
        CHECK_HOLDS(tally_error(), part);
        memset(result, 0, bytes);
    }
    CHECK(tally_comm_close(c) == 0);
    for (size_t i = 0; err && i < bytes; i++)
        CHECK(((char *)result)[i] == 0);
}

void job_kill_tallyd(struct job *j, atomic_int *stage, int at)
{
    kill_one(j, &j->tallyd_pid[0], stage, at);
}

int job_layout(const char *layout, int machine[JOB_MOST_RANKS])
{
    int ranks = 0;
    for (; layout[ranks]; ranks++)
        machine[ranks] = layout[ranks] - 'a';
    return ranks;
}

int job_reduction(int dtype, int reduction)
{
    bool complex = dtype == TALLY_COMPLEX64 || dtype == TALLY_COMPLEX128;
    bool whole = dtype >= TALLY_INT8 && !complex;
    if (reduction >= TALLY_BAND && !whole)
        reduction = TALLY_AVERAGE;
    if (complex && (reduction == TALLY_MIN || reduction == TALLY_MAX))
        reduction = TALLY_PRODUCT;
    return dtype == TALLY_BOOL && reduction == TALLY_AVERAGE ? TALLY_SUM : reduction;
}

/* --- in a rank ------------------------------------------------------------------------------------ */

tally_comm *job_open(void)
{
    tally_comm *c;
    CHECK(tally_comm_open(NULL, &c) == 0);
    return c;
}

struct tally_options job_in(tally_group *g)
{
    return (struct tally_options){.size = sizeof(struct tally_options), .group = g};
}

int job_ends(tally_op *op)
{
    int err = tally_op_wait(op, -1);
    tally_op_free(op);
    return err;
}

void job_expect(tally_op *op, int expected)
{
    int err = tally_op_wait(op, -1);
    if (err != expected)
        fprintf(stderr, "%d, not %d: %s\n", err, expected, tally_op_error(op));
    CHECK(err == expected);
    tally_op_free(op);
}

void job_barrier(tally_comm *c)
{
    tally_op *op;
    CHECK(tally_barrier(c, NULL, NULL, &op) == 0 && job_ends(op) == 0);
}

unsigned long long job_bytes_in_use(tally_comm *c)
{
    char *json;
    unsigned long long sum = 0, v;
    CHECK(tally_comm_report(c, 60000, &json) == 0);
    for (const char *at = json; (at = strstr(at, "\"bytes_in_use\": ")); at++)
        if (sscanf(at + 16, "%llu", &v) == 1)
            sum += v;
    free(json);
    return sum;
}

void job_leave(tally_comm *c)
{
    job_barrier(c);
    for (int i = 0; job_bytes_in_use(c); i++) {
        CHECK(i < 2000);
        job_sleep_ms(5);
    }
    job_barrier(c); /* or somebody goes on and pushes while others still look */
    CHECK(tally_comm_status(c, NULL) == 0);
    CHECK(tally_comm_close(c) == 0);
}

void *job_memory(tally_comm *c, size_t bytes, bool pooled)
{
    void *m = NULL;
    if (pooled)
        CHECK(tally_alloc(c, bytes + 1, &m) == 0);
    else
        CHECK((m = malloc(bytes + 1)));
    return m;
}

void job_give_back(void *memory, bool pooled)
{
    if (pooled)
        CHECK(tally_free(memory) == 0);
    else
        free(memory);
}
