/* fake_test.c - the fake card's own ways: strictness, faults, counters.  verbs_smoke.c has what a real card does, too. */
#include <errno.h>
#include <poll.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "test/rdma/fake_verbs.h"
#include "test/rdma/pair.h"

enum { SIGNALED = TLY_IBV_SEND_SIGNALED, HALF = END_BYTES / 2 };

static int begin(void **state)
{
    fake_verbs_set("");
    return 0;
}

static int nothing_is_left(void **state)
{
    assert_int_equal(fake_verbs_left(), 0);
    assert_int_equal(fake_verbs_count(FAKE_REGISTERED), 0);
    return 0;
}

static uint64_t counted(enum fake_verbs_count which)
{
    static uint64_t before[FAKE_COUNTS];
    uint64_t now = fake_verbs_count(which), more = now - before[which];
    before[which] = now;
    return more;
}

static void count_anew(void)
{
    for (int i = 0; i < FAKE_COUNTS; i++)
        counted((enum fake_verbs_count)i);
}

/* --- strictness --------------------------------------------------------------------------------------------------- */

static void a_place_is_free_once_a_completion_is_polled(void **state)
{
    struct end e[2];
    ends_open(e);
    for (int i = 0; i < END_WR - 1; i++)
        assert_int_equal(end_write(&e[0], 1, 0, 8, &e[1].own, 0, 0), 0);
    assert_int_equal(end_write(&e[0], 2, 0, 8, &e[1].own, 0, SIGNALED), 0);
    struct pollfd p = {.fd = e[0].channel->fd, .events = POLLIN};
    assert_int_equal(tly_ibv_req_notify_cq(e[0].cq, 0), 0);
    poll(&p, 1, 50); /* it is done by now, or not */
    assert_int_equal(end_write(&e[0], 3, 0, 8, &e[1].own, 0, 0), ENOMEM);
    end_expect(&e[0], 2, TLY_IBV_WC_SUCCESS);
    assert_int_equal(end_write(&e[0], 3, 0, 8, &e[1].own, 0, SIGNALED), 0);
    end_expect(&e[0], 3, TLY_IBV_WC_SUCCESS);
    ends_close(e);
}

/* Requests of a list that stand before the refused one stay posted. */
static void a_list_is_taken_up_to_a_mistake(void **state)
{
    struct end e[2];
    ends_open(e);
    struct tly_ibv_sge sge = end_sge(&e[0], 0, 8), many[3] = {sge, sge, sge};
    struct tly_ibv_send_wr *bad,
        second = {.wr_id = 2, .sg_list = many, .num_sge = 3, .opcode = TLY_IBV_WR_SEND},
        first = {.wr_id = 1,
                 .next = &second,
                 .sg_list = &sge,
                 .num_sge = 1,
                 .opcode = TLY_IBV_WR_SEND,
                 .send_flags = SIGNALED};
    end_receive(&e[1], 7, 0, 8);
    assert_int_equal(tly_ibv_post_send(e[0].qp, &first, &bad), EINVAL);
    assert_ptr_equal(bad, &second);
    end_expect(&e[0], 1, TLY_IBV_WC_SUCCESS);
    end_expect(&e[1], 7, TLY_IBV_WC_SUCCESS);
    ends_close(e);
}

static void transitions_want_all_attributes(void **state)
{
    struct end e;
    struct tly_ibv_qp_attr a = {.qp_state = TLY_IBV_QPS_RTR};
    end_open(&e, 0);
    end_init(&e);
    assert_int_equal(tly_verbs.modify_qp(e.qp, &a, TLY_IBV_QP_STATE | TLY_IBV_QP_AV), EINVAL);
    a.qp_state = TLY_IBV_QPS_RTS;
    assert_int_equal(tly_verbs.modify_qp(e.qp, &a, TLY_IBV_QP_STATE), EINVAL);
    assert_int_equal(end_modify(&e, TLY_IBV_QPS_RESET), 0);
    assert_int_equal(end_modify(&e, TLY_IBV_QPS_INIT), EINVAL);
    end_close(&e);
}

/* Each must name the other: number, GID and first PSN. */
static void ends_must_agree(void **state)
{
    for (int what = 0; what < 3; what++) {
        struct end e[2];
        for (int i = 0; i < 2; i++) {
            end_open(&e[i], i);
            end_init(&e[i]);
        }
        struct end_address other = e[0].own;
        if (what == 0)
            other.number ^= 0x8000;
        else if (what == 1)
            other.gid.raw[15] ^= 0x40;
        else
            other.psn++;
        end_connect(&e[0], &e[1].own);
        end_connect(&e[1], &other);
        end_receive(&e[1], 1, 0, 8);
        assert_int_equal(end_send(&e[0], 2, 0, 8, SIGNALED), 0);
        end_expect(&e[0], 2, TLY_IBV_WC_RETRY_EXC_ERR);
        ends_close(e);
    }
}

static void a_cq_that_overruns_ends_its_queue_pairs(void **state)
{
    struct end e[2];
    for (int i = 0; i < 2; i++) {
        end_open(&e[i], i);
        e[i].cqe = 2;
        end_init(&e[i]);
    }
    end_connect(&e[0], &e[1].own);
    end_connect(&e[1], &e[0].own);
    for (int i = 0; i < 3; i++)
        assert_int_equal(end_write(&e[0], (uint64_t)i, 0, 8, &e[1].own, 0, SIGNALED), 0);
    assert_int_equal(end_event(&e[0]), TLY_IBV_EVENT_CQ_ERR);
    end_expect(&e[0], 0, TLY_IBV_WC_SUCCESS);
    ends_close(e);
}

static void completions_outlive_their_queue_pair_or_not(void **state)
{
    for (int purged = 0; purged < 2; purged++) {
        struct end e[2];
        struct tly_ibv_wc wc;
        fake_verbs_set(purged ? "purge" : "");
        ends_open(e);
        end_receive(&e[1], 3, 0, 8);
        assert_int_equal(end_send(&e[0], 2, 0, 8, SIGNALED), 0);
        end_expect(&e[0], 2, TLY_IBV_WC_SUCCESS);
        end_destroy_qp(&e[1]);
        assert_int_equal(end_poll(&e[1], &wc), !purged);
        ends_close(e);
    }
}

static void a_solicited_completion_wakes(void **state)
{
    struct end e[2];
    struct tly_ibv_cq *cq;
    void *user;
    ends_open(e);
    struct pollfd p = {.fd = e[1].channel->fd, .events = POLLIN};
    end_receive(&e[1], 1, 0, 8);
    end_receive(&e[1], 2, 0, 8);
    assert_int_equal(tly_ibv_req_notify_cq(e[1].cq, 1), 0);
    assert_int_equal(end_send(&e[0], 3, 0, 8, SIGNALED), 0);
    end_expect(&e[0], 3, TLY_IBV_WC_SUCCESS);
    assert_int_equal(poll(&p, 1, 0), 0);
    assert_int_equal(end_send(&e[0], 4, 0, 8, SIGNALED | TLY_IBV_SEND_SOLICITED), 0);
    assert_int_equal(poll(&p, 1, 60000), 1);
    assert_int_equal(tly_verbs.get_cq_event(e[1].channel, &cq, &user), 0);
    tly_verbs.ack_cq_events(cq, 1);
    end_expect(&e[0], 4, TLY_IBV_WC_SUCCESS);
    ends_close(e);
}

/* The first message of a connection whose end is not RTS yet. */
static void a_message_establishes_a_connection(void **state)
{
    struct end e[2];
    for (int i = 0; i < 2; i++) {
        end_open(&e[i], i);
        end_init(&e[i]);
    }
    end_connect(&e[0], &e[1].own);
    struct tly_ibv_qp_attr a = {
        .qp_state = TLY_IBV_QPS_RTR,
        .path_mtu = e[0].own.mtu,
        .dest_qp_num = e[0].own.number,
        .rq_psn = e[0].own.psn,
        .ah_attr = {.grh = {.dgid = e[0].own.gid, .sgid_index = (uint8_t)e[1].gid_index},
                    .is_global = 1,
                    .port_num = 1}};
    assert_int_equal(tly_verbs.modify_qp(e[1].qp, &a,
                                         TLY_IBV_QP_STATE | TLY_IBV_QP_AV | TLY_IBV_QP_PATH_MTU |
                                             TLY_IBV_QP_DEST_QPN | TLY_IBV_QP_RQ_PSN |
                                             TLY_IBV_QP_MAX_DEST_RD_ATOMIC | TLY_IBV_QP_MIN_RNR_TIMER),
                     0);
    end_receive(&e[1], 1, 0, 8);
    assert_int_equal(end_send(&e[0], 2, 0, 8, SIGNALED), 0);
    end_expect(&e[0], 2, TLY_IBV_WC_SUCCESS);
    assert_int_equal(end_event(&e[1]), TLY_IBV_EVENT_COMM_EST);
    ends_close(e);
}

static void memory_is_checked_when_it_is_registered(void **state)
{
    struct end e;
    end_open(&e, 0);
    assert_null(tly_verbs.reg_mr(e.pd, e.memory, 8, TLY_IBV_ACCESS_REMOTE_WRITE));
    assert_int_equal(errno, EINVAL);
    char *hole = mmap(NULL, 3 * 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    munmap(hole + 4096, 4096);
    assert_null(tly_verbs.reg_mr(e.pd, hole, 3 * 4096, TLY_IBV_ACCESS_LOCAL_WRITE));
    assert_int_equal(errno, EFAULT);
    munmap(hole, 3 * 4096);
    end_close(&e);
}

static void a_child_lacks_registered_pages(void **state)
{
    struct end e;
    int status;
    fake_verbs_set("dontfork");
    end_open(&e, 0);
    assert_int_equal(tly_verbs.fork_init(), EINVAL); /* memory is registered */
    pid_t pid = fork();
    if (pid == 0) {
        unsigned char there;
        _exit(mincore(e.memory, 4096, &there) == 0);
    }
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_int_equal(status, 0);
    end_close(&e);
}

/* --- faults ------------------------------------------------------------------------------------------------------ */

static void the_nth_call_fails(void **state)
{
    struct end e;
    end_open(&e, 0);
    fake_verbs_set("fail=ibv_create_cq:ENOMEM:2:2");
    struct tly_ibv_cq *first = tly_verbs.create_cq(e.context, 4, NULL, NULL, 0);
    assert_non_null(first);
    for (int i = 0; i < 2; i++) {
        assert_null(tly_verbs.create_cq(e.context, 4, NULL, NULL, 0));
        assert_int_equal(errno, ENOMEM);
    }
    assert_int_equal(tly_verbs.destroy_cq(first), 0);
    end_close(&e);
}

static void memory_that_may_be_locked_ends(void **state)
{
    fake_verbs_set("memlock=1048576");
    struct end e;
    end_open(&e, 0);
    uint8_t byte;
    assert_null(tly_verbs.reg_mr(e.pd, &byte, 1, 0));
    assert_int_equal(errno, ENOMEM);
    end_close(&e);
}

static void a_device_vanishes(void **state)
{
    for (int silent = 0; silent < 2; silent++) {
        struct end e[2];
        struct tly_ibv_wc wc;
        ends_open(e);
        fake_verbs_set(silent ? "vanish=3 silent" : "vanish=3");
        end_receive(&e[0], 9, HALF, 64);
        for (int i = 0; i < 4; i++)
            assert_int_equal(end_write(&e[0], (uint64_t)i, 0, 8, &e[1].own, 0, SIGNALED), 0);
        assert_int_equal(end_event(&e[0]), TLY_IBV_EVENT_DEVICE_FATAL);
        end_expect(&e[0], 0, TLY_IBV_WC_SUCCESS);
        end_expect(&e[0], 1, TLY_IBV_WC_SUCCESS);
        if (!silent)
            for (int i = 0; i < 3; i++)
                assert_int_equal(end_wait(&e[0]).status, TLY_IBV_WC_WR_FLUSH_ERR);
        else
            assert_false(end_poll(&e[0], &wc));
        errno = 0;
        assert_null(tly_verbs.alloc_pd(e[0].context));
        assert_int_equal(errno, EIO);
        assert_int_equal(end_send(&e[1], 5, 0, 8, SIGNALED), 0);
        end_expect(&e[1], 5, TLY_IBV_WC_RETRY_EXC_ERR);
        ends_close(e);
    }
}

static void a_link_goes_down_and_comes_back(void **state)
{
    struct end e[2];
    struct tly_ibv_port_attr port = {0};
    for (int i = 0; i < 2; i++) {
        end_open(&e[i], i);
        e[i].timeout = 0; /* for ever */
        end_init(&e[i]);
    }
    end_connect(&e[0], &e[1].own);
    end_connect(&e[1], &e[0].own);
    fake_verbs_link(0);
    assert_int_equal(end_event(&e[0]), TLY_IBV_EVENT_PORT_ERR);
    assert_int_equal(tly_verbs.query_port(e[0].context, 1, &port), 0);
    assert_int_equal(port.state, TLY_IBV_PORT_DOWN);
    assert_int_equal(end_write(&e[0], 1, 0, 8, &e[1].own, 0, SIGNALED), 0);
    fake_verbs_link(1);
    assert_int_equal(end_event(&e[0]), TLY_IBV_EVENT_PORT_ACTIVE);
    end_expect(&e[0], 1, TLY_IBV_WC_SUCCESS);
    ends_close(e);
}

static void an_answer_is_lost(void **state)
{
    struct end e[2];
    ends_open(e);
    fake_verbs_set("lost=2");
    for (int i = 0; i < 3; i++)
        assert_int_equal(end_write(&e[0], (uint64_t)i, 0, 8, &e[1].own, 0, SIGNALED), 0);
    end_expect(&e[0], 0, TLY_IBV_WC_SUCCESS);
    end_expect(&e[0], 1, TLY_IBV_WC_RETRY_EXC_ERR);
    end_expect(&e[0], 2, TLY_IBV_WC_WR_FLUSH_ERR);
    ends_close(e);
}

/* Late, in pieces, and in order all the same; a queue pair that is destroyed between two pieces is a fence. */
static void pieces_and_delays(void **state)
{
    struct end e[2];
    fake_verbs_set("seed=5 delay=300 pieces=4096");
    ends_open(e);
    for (int i = 0; i < 8; i++) {
        memset(e[0].memory, i + 1, HALF);
        end_receive(&e[1], (uint64_t)i, HALF, 64);
        assert_int_equal(end_write(&e[0], 0, 0, HALF, &e[1].own, 0, 0), 0);
        assert_int_equal(end_send(&e[0], (uint64_t)i, HALF, 8, SIGNALED), 0);
        end_expect(&e[1], (uint64_t)i, TLY_IBV_WC_SUCCESS);
        for (int at = 0; at < HALF; at++)
            assert_int_equal(e[1].memory[at], i + 1);
        end_expect(&e[0], (uint64_t)i, TLY_IBV_WC_SUCCESS);
    }
    for (int i = 0; i < 8; i++)
        assert_int_equal(end_write(&e[0], 0, 0, HALF, &e[1].own, 0, SIGNALED), 0);
    usleep(500);
    end_destroy_qp(&e[1]);
    memset(e[1].memory, 99, HALF);
    for (int i = 0; i < 8 && end_wait(&e[0]).status == TLY_IBV_WC_SUCCESS; i++)
        ;
    for (int at = 0; at < HALF; at++)
        assert_int_equal(e[1].memory[at], 99);
    ends_close(e);
}

/* Connect to the parent, and die while a child of one's own keeps the device open. */
static void die_as_a_parent(int fd)
{
    struct end e;
    struct end_address to;
    char word;
    end_open(&e, 0);
    end_init(&e);
    if (read(fd, &to, sizeof to) != sizeof to)
        _exit(1);
    end_connect(&e, &to);
    if (write(fd, &e.own, sizeof e.own) != sizeof e.own)
        _exit(1);
    if (fork() == 0)
        _exit(read(fd, &word, 1) != 0); /* until the test closes its end */
    _exit(0);
}

/* A WRITE that lands in part fails, also right behind one to a process that has died, which is nothing but lost. */
static void a_write_that_falls_short_fails(void **state)
{
    struct end e, pair[2];
    struct end_address to;
    int fd[2], status;
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fd), 0);
    pid_t pid = fork();
    if (pid == 0) {
        close(fd[0]);
        die_as_a_parent(fd[1]);
    }
    close(fd[1]);
    end_open(&e, 0);
    end_init(&e);
    assert_int_equal(write(fd[0], &e.own, sizeof e.own), sizeof e.own);
    assert_int_equal(read(fd[0], &to, sizeof to), sizeof to);
    end_connect(&e, &to);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_int_equal(status, 0);
    ends_open(pair);
    munmap(pair[1].memory + 4096, 4096);
    assert_int_equal(end_write(&e, 1, 0, 8192, &to, 0, SIGNALED), 0);
    end_expect(&e, 1, TLY_IBV_WC_SUCCESS);
    assert_int_equal(end_write(&pair[0], 2, 0, 8192, &pair[1].own, 0, SIGNALED), 0);
    end_expect(&pair[0], 2, TLY_IBV_WC_REM_OP_ERR);
    close(fd[0]);
    ends_close(pair);
    end_close(&e);
}

/* The same seed lets the same calls fail. */
static void calls_fail_at_random(void **state)
{
    struct end e;
    uint64_t failed[2] = {0};
    end_open(&e, 0);
    for (int turn = 0; turn < 2; turn++) {
        fake_verbs_set("seed=3 random=4");
        for (int i = 0; i < 40; i++) {
            struct tly_ibv_pd *pd = tly_verbs.alloc_pd(e.context);
            failed[turn] = failed[turn] << 1 | !pd;
            if (pd)
                assert_int_equal(tly_verbs.dealloc_pd(pd), 0);
        }
    }
    assert_int_equal(failed[0], failed[1]);
    assert_in_range(__builtin_popcountll(failed[0]), 4, 20);
    fake_verbs_set("");
    end_close(&e);
}

static void no_devices(void **state)
{
    fake_verbs_set("devices=0");
    int count = -1;
    struct tly_ibv_device **list = tly_verbs.get_device_list(&count);
    assert_non_null(list);
    assert_int_equal(count, 0);
    tly_verbs.free_device_list(list);
    fake_verbs_set("fail=ibv_get_device_list:ENOSYS");
    assert_null(tly_verbs.get_device_list(&count));
    assert_int_equal(errno, ENOSYS);
}

/* One GID, and a LID that finds the other end. */
static void infiniband(void **state)
{
    struct end e[2];
    fake_verbs_set("infiniband");
    ends_open(e);
    assert_int_equal(e[0].gid_index, 0);
    end_receive(&e[1], 1, 0, 8);
    assert_int_equal(end_send(&e[0], 2, 0, 8, SIGNALED), 0);
    end_expect(&e[0], 2, TLY_IBV_WC_SUCCESS);
    end_expect(&e[1], 1, TLY_IBV_WC_SUCCESS);
    ends_close(e);
}

/* --- counters ----------------------------------------------------------------------------------------------------- */

static void posts_and_completions_are_counted(void **state)
{
    struct end e[2];
    count_anew();
    ends_open(e);
    assert_int_equal(counted(FAKE_REGISTERED), 2 * END_BYTES);
    end_receive(&e[1], 1, HALF, 64);
    struct tly_ibv_sge payload = end_sge(&e[0], 0, 4096), header = end_sge(&e[0], HALF, 40);
    struct tly_ibv_send_wr *bad,
        send = {.sg_list = &header, .num_sge = 1, .opcode = TLY_IBV_WR_SEND, .send_flags = SIGNALED},
        write = {.next = &send,
                 .sg_list = &payload,
                 .num_sge = 1,
                 .opcode = TLY_IBV_WR_RDMA_WRITE,
                 .wr.rdma = {.remote_addr = e[1].own.at, .rkey = e[1].own.key}};
    assert_int_equal(tly_ibv_post_send(e[0].qp, &write, &bad), 0);
    end_expect(&e[0], 0, TLY_IBV_WC_SUCCESS);
    end_expect(&e[1], 1, TLY_IBV_WC_SUCCESS);
    assert_int_equal(counted(FAKE_SEND_POSTS), 1);
    assert_int_equal(counted(FAKE_SENDS), 2);
    assert_int_equal(counted(FAKE_RECVS), 1);
    assert_int_equal(counted(FAKE_COMPLETIONS), 2);
    assert_int_equal(counted(FAKE_ERRORS), 0);
    assert_int_equal(counted(FAKE_BYTES), 4096 + 40);
    assert_int_equal(counted(FAKE_RNRS), 0);
    ends_close(e);
}

/* All processes count in one file, also one that meets the others at a path. */
static void processes_count_in_a_file(void **state)
{
    char file[40] = "/tmp/fake_test.XXXXXX", words[200];
    int fd = mkstemp(file);
    uint64_t counts[FAKE_COUNTS] = {0};
    snprintf(words, sizeof words, "count=%s fabric=%s.sock", file, file);
    for (int i = 0; i < 2; i++) {
        pid_t pid = fork();
        if (pid == 0) {
            struct end e[2];
            setenv("FAKE_VERBS", words, 1);
            fake_verbs_set(words);
            ends_open(e);
            end_receive(&e[1], 1, 0, 64);
            if (end_send(&e[0], 2, 0, 64, SIGNALED) == 0)
                end_expect(&e[0], 2, TLY_IBV_WC_SUCCESS);
            ends_close(e);
            _exit(0);
        }
        int status;
        assert_int_equal(waitpid(pid, &status, 0), pid);
        assert_int_equal(status, 0);
    }
    assert_int_equal(pread(fd, counts, sizeof counts, 0), sizeof counts);
    assert_int_equal(counts[FAKE_SENDS], 2);
    assert_int_equal(counts[FAKE_BYTES], 128);
    close(fd);
    unlink(file);
    strcat(file, ".sock");
    unlink(file);
}

/* --- misuse ------------------------------------------------------------------------------------------------------- */

/* In a child, which the fake ends. */
static void misuse(void (*what)(void))
{
    pid_t pid = fork();
    if (pid == 0) {
        if (!freopen("/dev/null", "w", stderr))
            _exit(1);
        signal(SIGABRT, SIG_DFL);
        what();
        _exit(0);
    }
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
}

static void leave_an_event(void)
{
    struct end e[2];
    struct tly_ibv_cq *cq;
    void *user;
    ends_open(e);
    struct pollfd p = {.fd = e[0].channel->fd, .events = POLLIN};
    tly_ibv_req_notify_cq(e[0].cq, 0);
    end_write(&e[0], 1, 0, 8, &e[1].own, 0, SIGNALED);
    poll(&p, 1, 60000);
    tly_verbs.get_cq_event(e[0].channel, &cq, &user);
    end_destroy_qp(&e[0]);
    tly_verbs.destroy_cq(e[0].cq);
}

static void leave_objects(void)
{
    struct end e;
    end_open(&e, 0);
    tly_verbs.close_device(e.context);
}

static void misuse_ends_the_process(void **state)
{
    misuse(leave_an_event);
    misuse(leave_objects);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, begin, nothing_is_left)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(a_place_is_free_once_a_completion_is_polled),
        TEST(a_list_is_taken_up_to_a_mistake),
        TEST(transitions_want_all_attributes),
        TEST(ends_must_agree),
        TEST(a_cq_that_overruns_ends_its_queue_pairs),
        TEST(completions_outlive_their_queue_pair_or_not),
        TEST(a_solicited_completion_wakes),
        TEST(a_message_establishes_a_connection),
        TEST(memory_is_checked_when_it_is_registered),
        TEST(a_child_lacks_registered_pages),
        TEST(the_nth_call_fails),
        TEST(memory_that_may_be_locked_ends),
        TEST(a_device_vanishes),
        TEST(a_link_goes_down_and_comes_back),
        TEST(an_answer_is_lost),
        TEST(pieces_and_delays),
        TEST(a_write_that_falls_short_fails),
        TEST(calls_fail_at_random),
        TEST(no_devices),
        TEST(infiniband),
        TEST(posts_and_completions_are_counted),
        TEST(processes_count_in_a_file),
        TEST(misuse_ends_the_process),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
