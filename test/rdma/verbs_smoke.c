/* verbs_smoke.c - what Tally relies on of verbs: the same program passes on the fake card and on Linux's Soft-RoCE.
 *
 * TEST_RDMA_DEVICE=DEVICE,DEVICE names the devices of the two ends. */
#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "test/rdma/pair.h"

enum { SIGNALED = TLY_IBV_SEND_SIGNALED, HALF = END_BYTES / 2, MANY = 300000 };

static void fill(uint8_t *at, size_t bytes, int seed)
{
    for (size_t i = 0; i < bytes; i++)
        at[i] = (uint8_t)(i * 7 + i / 251 + (size_t)seed);
}

static void assert_same(const uint8_t *a, const uint8_t *b, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++)
        if (a[i] != b[i])
            fail_msg("byte %zu differs", i);
}

/* --- messages --------------------------------------------------------------------------------------------------- */

static void a_send_is_received(void **state)
{
    struct end e[2];
    ends_open(e);
    fill(e[0].memory, 5000, 1);
    end_receive(&e[1], 11, HALF, 8192);
    assert_int_equal(end_send(&e[0], 7, 0, 5000, SIGNALED), 0);
    end_expect(&e[0], 7, TLY_IBV_WC_SUCCESS);
    struct tly_ibv_wc wc = end_wait(&e[1]);
    assert_int_equal(wc.status, TLY_IBV_WC_SUCCESS);
    assert_int_equal(wc.opcode, TLY_IBV_WC_RECV);
    assert_int_equal(wc.wr_id, 11);
    assert_int_equal(wc.byte_len, 5000);
    assert_same(e[1].memory + HALF, e[0].memory, 5000);
    ends_close(e);
}

/* Receives are used in their order, whichever message comes. */
static void messages_keep_their_order(void **state)
{
    struct end e[2];
    ends_open(e);
    for (int i = 0; i < END_WR; i++)
        end_receive(&e[1], (uint64_t)i, (size_t)i * 4096, 4096);
    for (int i = 0; i < END_WR; i++) {
        e[0].memory[i] = (uint8_t)i;
        assert_int_equal(end_send(&e[0], (uint64_t)i, (size_t)i, 1, SIGNALED), 0);
    }
    for (int i = 0; i < END_WR; i++) {
        end_expect(&e[0], (uint64_t)i, TLY_IBV_WC_SUCCESS);
        end_expect(&e[1], (uint64_t)i, TLY_IBV_WC_SUCCESS);
        assert_int_equal(e[1].memory[i * 4096], i);
    }
    ends_close(e);
}

/* A payload and a message behind it, in one post and with one completion: the message comes last. */
static void a_write_and_a_send_in_one_post(void **state)
{
    struct end e[2];
    ends_open(e);
    fill(e[0].memory, MANY, 3);
    end_receive(&e[1], 1, HALF, 64);
    struct tly_ibv_sge payload = end_sge(&e[0], 0, MANY), header = end_sge(&e[0], HALF, 40);
    struct tly_ibv_send_wr *bad,
        send =
            {.wr_id = 2, .sg_list = &header, .num_sge = 1, .opcode = TLY_IBV_WR_SEND, .send_flags = SIGNALED},
        write = {.wr_id = 1,
                 .next = &send,
                 .sg_list = &payload,
                 .num_sge = 1,
                 .opcode = TLY_IBV_WR_RDMA_WRITE,
                 .wr.rdma = {.remote_addr = e[1].own.at, .rkey = e[1].own.key}};
    assert_int_equal(tly_ibv_post_send(e[0].qp, &write, &bad), 0);
    end_expect(&e[1], 1, TLY_IBV_WC_SUCCESS);
    assert_same(e[1].memory, e[0].memory, MANY);
    end_expect(&e[0], 2, TLY_IBV_WC_SUCCESS);
    struct tly_ibv_wc wc;
    assert_false(end_poll(&e[0], &wc));
    assert_false(end_poll(&e[1], &wc));
    ends_close(e);
}

static void inline_data_is_read_by_the_post(void **state)
{
    struct end e[2];
    ends_open(e);
    end_receive(&e[1], 1, 0, END_INLINE);
    fill(e[0].memory, END_INLINE, 9);
    assert_int_equal(end_send(&e[0], 2, 0, END_INLINE, SIGNALED | TLY_IBV_SEND_INLINE), 0);
    memset(e[0].memory, 0, END_INLINE);
    end_expect(&e[1], 1, TLY_IBV_WC_SUCCESS);
    end_expect(&e[0], 2, TLY_IBV_WC_SUCCESS);
    fill(e[0].memory, END_INLINE, 9);
    assert_same(e[1].memory, e[0].memory, END_INLINE);
    ends_close(e);
}

static void two_entries_make_one_message(void **state)
{
    struct end e[2];
    ends_open(e);
    fill(e[0].memory, END_BYTES, 4);
    end_receive(&e[1], 1, 0, 8192);
    struct tly_ibv_sge parts[2] = {end_sge(&e[0], 100, 88), end_sge(&e[0], 5000, 4000)};
    struct tly_ibv_send_wr *bad,
        wr = {.sg_list = parts,
              .num_sge = 2,
              .opcode = TLY_IBV_WR_SEND_WITH_IMM,
              .send_flags = SIGNALED,
              .imm_data = 0x01020304};
    assert_int_equal(tly_ibv_post_send(e[0].qp, &wr, &bad), 0);
    struct tly_ibv_wc wc = end_wait(&e[1]);
    assert_int_equal(wc.status, TLY_IBV_WC_SUCCESS);
    assert_int_equal(wc.byte_len, 4088);
    assert_true(wc.wc_flags & TLY_IBV_WC_WITH_IMM);
    assert_int_equal(wc.imm_data, 0x01020304);
    assert_same(e[1].memory, e[0].memory + 100, 88);
    assert_same(e[1].memory + 88, e[0].memory + 5000, 4000);
    ends_close(e);
}

/* --- queues ------------------------------------------------------------------------------------------------------ */

/* The receiver has posted nothing, so nothing is done. */
static void a_full_queue_takes_no_more(void **state)
{
    struct end e[2];
    struct tly_ibv_wc wc;
    int posted = 0;
    ends_open(e);
    while (end_send(&e[0], 0, 0, 8, SIGNALED) == 0 && posted < 10000)
        posted++;
    assert_in_range(posted, END_WR, 9999);
    assert_int_equal(end_send(&e[0], 0, 0, 8, SIGNALED), ENOMEM);
    assert_false(end_poll(&e[0], &wc));
    ends_close(e);
}

static void a_completion_frees_what_is_before_it(void **state)
{
    struct end e[2];
    ends_open(e);
    for (int round = 0; round < 5; round++) {
        for (int i = 0; i < END_WR - 1; i++)
            assert_int_equal(end_write(&e[0], 0, 0, 8, &e[1].own, 0, 0), 0);
        assert_int_equal(end_write(&e[0], 100, 0, 8, &e[1].own, 0, SIGNALED), 0);
        end_expect(&e[0], 100, TLY_IBV_WC_SUCCESS);
    }
    ends_close(e);
}

static void nothing_is_posted_too_early(void **state)
{
    struct end e;
    end_open(&e, 0);
    end_init(&e);
    assert_int_not_equal(end_send(&e, 1, 0, 8, SIGNALED), 0);
    end_receive(&e, 2, 0, 8);
    end_close(&e);
}

/* --- mistakes ---------------------------------------------------------------------------------------------------- */

/* Both ends end, and what they had posted comes back. */
static void a_wrong_key_is_refused(void **state)
{
    struct end e[2];
    ends_open(e);
    struct end_address wrong = e[1].own;
    wrong.key ^= 0x5500;
    memset(e[1].memory, 0, END_BYTES);
    fill(e[0].memory, 4096, 5);
    end_receive(&e[0], 31, HALF, 64);
    end_receive(&e[1], 41, HALF, 64);
    assert_int_equal(end_write(&e[0], 1, 0, 4096, &wrong, 0, 0), 0);
    assert_int_equal(end_send(&e[0], 2, 0, 64, SIGNALED), 0);
    end_expect(&e[0], 1, TLY_IBV_WC_REM_ACCESS_ERR);
    uint64_t ids = 0; /* two queues: in either order */
    for (int i = 0; i < 2; i++) {
        struct tly_ibv_wc wc = end_wait(&e[0]);
        assert_int_equal(wc.status, TLY_IBV_WC_WR_FLUSH_ERR);
        ids += wc.wr_id;
    }
    assert_int_equal(ids, 2 + 31);
    end_expect(&e[1], 41, TLY_IBV_WC_WR_FLUSH_ERR);
    for (int i = 0; i < 4096; i++)
        assert_int_equal(e[1].memory[i], 0);
    ends_close(e);
}

static void a_write_past_the_end_is_refused(void **state)
{
    struct end e[2];
    ends_open(e);
    assert_int_equal(end_write(&e[0], 1, 0, 4096, &e[1].own, END_BYTES - 4095, SIGNALED), 0);
    end_expect(&e[0], 1, TLY_IBV_WC_REM_ACCESS_ERR);
    ends_close(e);
}

static void memory_of_others_is_not_sent(void **state)
{
    struct end e[2];
    ends_open(e);
    end_receive(&e[1], 1, 0, 4096);
    uint8_t *beyond = e[0].memory + END_BYTES;
    struct tly_ibv_sge sge = {.addr = (uintptr_t)beyond - 8, .length = 64, .lkey = e[0].mr->lkey};
    struct tly_ibv_send_wr *bad,
        wr = {.wr_id = 3, .sg_list = &sge, .num_sge = 1, .opcode = TLY_IBV_WR_SEND, .send_flags = SIGNALED};
    int err = tly_ibv_post_send(e[0].qp, &wr, &bad);
    if (!err) /* a card sees it later than a library */
        end_expect(&e[0], 3, TLY_IBV_WC_LOC_PROT_ERR);
    ends_close(e);
}

static void a_message_may_be_too_long(void **state)
{
    struct end e[2];
    ends_open(e);
    end_receive(&e[1], 1, 0, 64);
    assert_int_equal(end_send(&e[0], 2, 0, 65, SIGNALED), 0);
    struct tly_ibv_wc there = end_wait(&e[1]), here = end_wait(&e[0]);
    if (here.status != TLY_IBV_WC_REM_OP_ERR) { /* Soft-RoCE says so, with LOC_QP_OP_ERR there */
        assert_int_equal(here.status, TLY_IBV_WC_REM_INV_REQ_ERR);
        assert_int_equal(there.status, TLY_IBV_WC_LOC_LEN_ERR);
    }
    ends_close(e);
}

static void a_receiver_that_is_not_ready(void **state)
{
    struct end e[2];
    for (int i = 0; i < 2; i++) {
        end_open(&e[i], i);
        e[i].rnr_retries = 1;
        end_init(&e[i]);
    }
    end_connect(&e[0], &e[1].own);
    end_connect(&e[1], &e[0].own);
    assert_int_equal(end_send(&e[0], 2, 0, 65, SIGNALED), 0);
    end_expect(&e[0], 2, TLY_IBV_WC_RNR_RETRY_EXC_ERR);
    ends_close(e);
}

static void a_receive_may_come_late(void **state)
{
    struct end e[2];
    ends_open(e);
    assert_int_equal(end_send(&e[0], 2, 0, 65, SIGNALED), 0);
    usleep(20000);
    end_receive(&e[1], 1, 0, 4096);
    end_expect(&e[0], 2, TLY_IBV_WC_SUCCESS);
    end_expect(&e[1], 1, TLY_IBV_WC_SUCCESS);
    ends_close(e);
}

/* --- ends -------------------------------------------------------------------------------------------------------- */

static void an_error_flushes_in_order(void **state)
{
    struct end e[2];
    struct tly_ibv_wc wc;
    ends_open(e);
    for (int i = 0; i < 5; i++)
        end_receive(&e[0], (uint64_t)i, 0, 64);
    assert_int_equal(end_modify(&e[0], TLY_IBV_QPS_ERR), 0);
    for (int i = 0; i < 5; i++)
        end_expect(&e[0], (uint64_t)i, TLY_IBV_WC_WR_FLUSH_ERR);
    assert_int_equal(end_send(&e[0], 9, 0, 64, 0), 0);
    end_expect(&e[0], 9, TLY_IBV_WC_WR_FLUSH_ERR);
    assert_false(end_poll(&e[0], &wc));
    ends_close(e);
}

/* Nothing lands once a queue pair has been destroyed, and the other end learns it by its retries. */
static void a_destroyed_queue_pair_is_a_fence(void **state)
{
    struct end e[2];
    ends_open(e);
    memset(e[1].memory, 0, END_BYTES);
    memset(e[0].memory, 1, END_BYTES);
    for (int i = 0; i < END_WR; i++)
        assert_int_equal(end_write(&e[0], (uint64_t)i, 0, END_BYTES, &e[1].own, 0, SIGNALED), 0);
    end_destroy_qp(&e[1]);
    memset(e[1].memory, 0, END_BYTES);
    struct tly_ibv_wc wc;
    int i = 0;
    for (wc = end_wait(&e[0]); wc.status == TLY_IBV_WC_SUCCESS && ++i < END_WR; wc = end_wait(&e[0]))
        ;
    for (size_t at = 0; at < END_BYTES; at++)
        if (e[1].memory[at])
            fail_msg("byte %zu was written behind the fence", at);
    if (wc.status != TLY_IBV_WC_SUCCESS)
        assert_int_equal(wc.status, TLY_IBV_WC_RETRY_EXC_ERR);
    ends_close(e);
}

static void a_sender_that_is_destroyed_leaves_no_trace(void **state)
{
    struct end e[2];
    ends_open(e);
    memset(e[0].memory, 1, END_BYTES);
    for (int i = 0; i < END_WR; i++)
        assert_int_equal(end_write(&e[0], (uint64_t)i, 0, END_BYTES, &e[1].own, 0, 0), 0);
    end_destroy_qp(&e[0]);
    memset(e[1].memory, 0, END_BYTES);
    usleep(50000);
    for (size_t at = 0; at < END_BYTES; at++)
        assert_int_equal(e[1].memory[at], 0);
    ends_close(e);
}

static void busy_objects_stay(void **state)
{
    struct end e;
    end_open(&e, 0);
    end_init(&e);
    assert_int_equal(tly_verbs.dealloc_pd(e.pd), EBUSY);
    assert_int_equal(tly_verbs.destroy_cq(e.cq), EBUSY);
    end_close(&e);
}

/* --- two processes ----------------------------------------------------------------------------------------------- */

static void give(int fd, const void *what, size_t bytes)
{
    if (write(fd, what, bytes) != (ssize_t)bytes)
        _exit(1);
}

static void take(int fd, void *what, size_t bytes)
{
    if (read(fd, what, bytes) != (ssize_t)bytes)
        _exit(1);
}

/* The child: one end, which writes, sends, and then waits until it is killed. */
static void child(int fd)
{
    struct end e;
    struct end_address to;
    end_open(&e, 1);
    end_init(&e);
    end_receive(&e, 1, HALF, 4096);
    give(fd, &e.own, sizeof e.own);
    take(fd, &to, sizeof to);
    end_connect(&e, &to);
    give(fd, "c", 1);
    end_expect(&e, 1, TLY_IBV_WC_SUCCESS);
    fill(e.memory, MANY, 77);
    if (end_write(&e, 2, 0, MANY, &to, 0, 0) != 0 || end_send(&e, 3, 0, 100, SIGNALED) != 0)
        _exit(1);
    end_expect(&e, 3, TLY_IBV_WC_SUCCESS);
    end_receive(&e, 4, 0, 4096);
    give(fd, "d", 1);
    for (;;)
        pause();
}

static void two_processes(void **state)
{
    struct end e;
    struct end_address to;
    int pair[2];
    char word;
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, pair), 0);
    pid_t pid = fork();
    if (pid == 0) {
        close(pair[0]);
        child(pair[1]);
    }
    close(pair[1]);
    end_open(&e, 0);
    end_init(&e);
    take(pair[0], &to, sizeof to);
    end_connect(&e, &to);
    end_receive(&e, 10, HALF, 4096);
    give(pair[0], &e.own, sizeof e.own);
    take(pair[0], &word, 1);
    assert_int_equal(end_send(&e, 11, 0, 50, SIGNALED), 0);
    end_expect(&e, 11, TLY_IBV_WC_SUCCESS);
    end_expect(&e, 10, TLY_IBV_WC_SUCCESS);
    uint8_t *same = malloc(MANY);
    fill(same, MANY, 77);
    assert_same(e.memory, same, MANY);
    free(same);
    take(pair[0], &word, 1);

    /* A process that is stopped still receives. */
    assert_int_equal(kill(pid, SIGSTOP), 0);
    assert_int_equal(waitpid(pid, NULL, WUNTRACED), pid);
    assert_int_equal(end_write(&e, 12, 0, MANY, &to, 0, SIGNALED), 0);
    end_expect(&e, 12, TLY_IBV_WC_SUCCESS);
    assert_int_equal(end_send(&e, 13, 0, 100, SIGNALED), 0);
    end_expect(&e, 13, TLY_IBV_WC_SUCCESS);

    /* A process that is killed answers no more. */
    assert_int_equal(kill(pid, SIGKILL), 0);
    assert_int_equal(waitpid(pid, NULL, 0), pid);
    assert_int_equal(end_write(&e, 14, 0, MANY, &to, 0, SIGNALED), 0);
    end_expect(&e, 14, TLY_IBV_WC_RETRY_EXC_ERR);
    close(pair[0]);
    end_close(&e);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_send_is_received),
        cmocka_unit_test(messages_keep_their_order),
        cmocka_unit_test(a_write_and_a_send_in_one_post),
        cmocka_unit_test(inline_data_is_read_by_the_post),
        cmocka_unit_test(two_entries_make_one_message),
        cmocka_unit_test(a_full_queue_takes_no_more),
        cmocka_unit_test(a_completion_frees_what_is_before_it),
        cmocka_unit_test(nothing_is_posted_too_early),
        cmocka_unit_test(a_wrong_key_is_refused),
        cmocka_unit_test(a_write_past_the_end_is_refused),
        cmocka_unit_test(memory_of_others_is_not_sent),
        cmocka_unit_test(a_message_may_be_too_long),
        cmocka_unit_test(a_receiver_that_is_not_ready),
        cmocka_unit_test(a_receive_may_come_late),
        cmocka_unit_test(an_error_flushes_in_order),
        cmocka_unit_test(a_destroyed_queue_pair_is_a_fence),
        cmocka_unit_test(a_sender_that_is_destroyed_leaves_no_trace),
        cmocka_unit_test(busy_objects_stay),
        cmocka_unit_test(two_processes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
