/* processes_test.c - a GPU's memory in other processes, on a driver that is not there (fake_cuda/). */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "device/device.h"
#include "machine/machine.h"
#include "test/device/fake_cuda.h"
#include "test/topo/machine_files.h"

enum { COUNT = 1000 };

/* --- the process that shows memory ------------------------------------------------------------------------- */

struct shower {
    pid_t pid;
    int ask, answer; /* descriptors: a byte each way; the first answer is the ticket */
};

/* In the child: GPU `number` has whole numbers from `first` on; a byte asks for the next step. */
static void show_memory(int number, int first, int ask, int answer)
{
    struct tly_device_ticket ticket;
    struct tly_device *d;
    void *x;
    char byte;
    float *data;
    if (tly_device_open(number, &d) || tly_device_alloc(d, COUNT * sizeof(float), &x) ||
        tly_device_export(d, x, &ticket) || !(data = fake_cuda_data(x)))
        _exit(1);
    for (int i = 0; i < COUNT; i++)
        data[i] = (float)(first + i);
    if (write(answer, &ticket, sizeof ticket) != sizeof ticket || read(ask, &byte, 1) != 1)
        _exit(2);
    if (tly_device_free(d, x) || write(answer, &byte, 1) != 1)
        _exit(3);
    tly_device_close(d);
    _exit(fake_cuda_left() || read(ask, &byte, 1) != 1 ? 4 : 0);
}

static struct shower show(int number, int first, struct tly_device_ticket *ticket)
{
    struct shower s;
    int ask[2], answer[2];
    assert_int_equal(pipe(ask) | pipe(answer), 0);
    s.pid = fork();
    if (s.pid == 0)
        show_memory(number, first, ask[0], answer[1]);
    close(ask[0]);
    close(answer[1]);
    s.ask = ask[1];
    s.answer = answer[0];
    assert_int_equal(read(s.answer, ticket, sizeof *ticket), sizeof *ticket);
    return s;
}

static void let_free(struct shower *s)
{
    char byte = 0;
    assert_int_equal(write(s->ask, &byte, 1), 1);
    assert_int_equal(read(s->answer, &byte, 1), 1);
}

static void let_end(struct shower *s)
{
    int status;
    assert_int_equal(write(s->ask, "", 1), 1);
    assert_int_equal(waitpid(s->pid, &status, 0), s->pid);
    assert_int_equal(status, 0);
    close(s->ask);
    close(s->answer);
}

/* --- the process that reads it -------------------------------------------------------------------------------- */

/* Two GPUs' numbers are added by a third, and bytes are counted where they go. */
static void sums_of_several_processes(void **state)
{
    struct tly_reduction r = {.dtype = TALLY_FLOAT32, .op = TALLY_SUM, .prescale = 1, .postscale = 1};
    struct tly_device_ticket ticket[2];
    struct tly_device *d;
    struct tly_mark *mark;
    void *x[3], *twice;
    fake_cuda_reset();
    setenv("FAKE_CUDA", "gpus=3 peers=0:1 peers=0:2", 1);
    struct shower s[2] = {show(1, 100, &ticket[0]), show(2, 5, &ticket[1])};
    assert_int_equal(tly_device_open(0, &d), 0);
    assert_int_equal(tly_device_alloc(d, COUNT * sizeof(float), &x[2]), 0);
    for (int i = 0; i < 2; i++)
        assert_int_equal(tly_device_map(d, &ticket[i], &x[i]), 0);
    assert_int_equal(tly_device_map(d, &ticket[0], &twice), -EIO);
    assert_int_equal(tly_device_sum(d, TLY_LANE_GROUP, &r, 2, (const void *const *)x, x[2], COUNT, &mark), 0);
    assert_int_equal(tly_device_wait(d, mark), 0);
    tly_device_unmark(d, mark);
    const float *sum = fake_cuda_data(x[2]);
    for (int i = 0; i < COUNT; i++)
        assert_true(sum[i] == (float)(105 + 2 * i));
    for (int from = 0; from < 4; from++)
        assert_int_equal(fake_cuda_moved(from, 1), from >= 2 ? COUNT * sizeof(float) : 0);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(tly_device_unmap(d, x[i]), 0);
        assert_int_equal(tly_device_unmap(d, x[i]), -EINVAL);
        let_free(&s[i]);
        let_end(&s[i]);
    }
    assert_int_equal(tly_device_free(d, x[2]), 0);
    tly_device_close(d);
    assert_int_equal(fake_cuda_left(), 0);
}

static void memory_that_is_freed_too_early(void **state)
{
    struct tly_device_ticket ticket;
    struct tly_device *d;
    void *x, *y;
    fake_cuda_reset();
    setenv("FAKE_CUDA", "gpus=1", 1);
    struct shower s = show(0, 1, &ticket);
    assert_int_equal(tly_device_open(0, &d), 0);
    assert_int_equal(tly_device_map(d, &ticket, &x), 0);
    const float *data = fake_cuda_data(x);
    assert_true(data[0] == 1);
    let_free(&s);
    assert_true(data[0] != 1); /* the driver would give something else */
    assert_int_equal(tly_device_unmap(d, x), 0);
    assert_int_equal(tly_device_map(d, &ticket, &y), -EINVAL);
    let_end(&s);
    tly_device_close(d);
    assert_int_equal(fake_cuda_left(), 0);
}

/* --- machines ------------------------------------------------------------------------------------------------- */

static bool reach(const struct tly_machine *m, int a, int b)
{
    return m->nvlink[a][b] > 0 || (m->gpu[a].nvswitch.bytes > 0 && m->gpu[b].nvswitch.bytes > 0) ||
           (!m->peers_off && m->gpu[a].parent >= 0 && m->gpu[a].parent == m->gpu[b].parent);
}

/* GPU 0 maps the memory of those that it reaches, and of no others. */
static void peers_of_machines(void **state)
{
    static const char *const names[] = {"dgx1", "hgx", "pcie", "workstation"};
    static struct tly_machine m;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        char why[256], words[2048];
        struct tly_device *d;
        int others = 0;
        assert_int_equal(load_machine(names[i], &m, why, sizeof why), 0);
        snprintf(words, sizeof words, "gpus=%d ", m.gpus);
        for (int a = 0; a < m.gpus; a++)
            for (int b = 0; b < a; b++)
                if (reach(&m, a, b))
                    snprintf(words + strlen(words), sizeof words - strlen(words), "peers=%d:%d ", a, b);
        fake_cuda_reset();
        setenv("FAKE_CUDA", words, 1);
        struct shower s[TLY_MAX_GPUS];
        struct tly_device_ticket ticket[TLY_MAX_GPUS];
        for (int g = 1; g < m.gpus; g++)
            s[g] = show(g, g, &ticket[g]);
        assert_int_equal(tly_device_open(0, &d), 0);
        for (int g = 1; g < m.gpus; g++) {
            void *x;
            int err = tly_device_map(d, &ticket[g], &x);
            assert_int_equal(err, reach(&m, 0, g) ? 0 : -ENOTSUP);
            if (!err)
                assert_int_equal(tly_device_unmap(d, x), 0);
            others += !err;
            let_free(&s[g]);
            let_end(&s[g]);
        }
        print_message("%s: %d GPUs, %d peers of GPU 0\n", names[i], m.gpus, others);
        tly_device_close(d);
        assert_int_equal(fake_cuda_left(), 0);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sums_of_several_processes),
        cmocka_unit_test(memory_that_is_freed_too_early),
        cmocka_unit_test(peers_of_machines),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
