/* loan.c - memory that is lent: who reads it, and how its owner takes it back. */
#include "transport/loan.h"

#include <stdlib.h>
#include <string.h>

struct tly_loan *tly_loan_create(size_t size, const uint8_t *data, uint32_t length)
{
    struct tly_loan *loan = calloc(1, size);
    if (!loan)
        return NULL;
    tly_list_init(&loan->node);
    atomic_init(&loan->references, 1);
    pthread_mutex_init(&loan->lock, NULL);
    pthread_cond_init(&loan->idle, NULL);
    loan->data = data;
    loan->length = length;
    return loan;
}

void tly_loan_ref(struct tly_loan *loan)
{
    atomic_fetch_add_explicit(&loan->references, 1, memory_order_relaxed);
}

void tly_loan_unref(struct tly_loan *loan)
{
    if (atomic_fetch_sub_explicit(&loan->references, 1, memory_order_acq_rel) != 1)
        return;
    tly_list_remove(&loan->node);
    if (loan->finish)
        loan->finish(loan);
    pthread_cond_destroy(&loan->idle);
    pthread_mutex_destroy(&loan->lock);
    free(loan->copy);
    free(loan);
}

const uint8_t *tly_loan_hold(struct tly_loan *loan)
{
    pthread_mutex_lock(&loan->lock);
    const uint8_t *data = loan->data;
    loan->readers += data != NULL;
    pthread_mutex_unlock(&loan->lock);
    return data;
}

void tly_loan_drop(struct tly_loan *loan)
{
    pthread_mutex_lock(&loan->lock);
    if (--loan->readers == 0)
        pthread_cond_broadcast(&loan->idle);
    pthread_mutex_unlock(&loan->lock);
}

void tly_loan_move(struct tly_loan *loan, uint8_t *copy)
{
    pthread_mutex_lock(&loan->lock);
    while (loan->readers)
        pthread_cond_wait(&loan->idle, &loan->lock);
    if (copy)
        memcpy(copy, loan->data, loan->length);
    free(loan->copy);
    loan->data = loan->copy = copy;
    pthread_mutex_unlock(&loan->lock);
}

void tly_loan_keep(struct tly_loan *loan)
{
    loan->kept = true;
    tly_loan_ref(loan);
}

static void loan_give_back(struct tly_loan *loan)
{
    if (loan->give_back)
        loan->give_back(loan);
}

void tly_loan_return(struct tly_loan *loan)
{
    if (!loan)
        return;
    loan->kept = false;
    if (!loan->open)
        loan_give_back(loan);
    tly_loan_unref(loan);
}

void tly_loan_end(struct tly_loan *loan)
{
    loan->open = false;
    if (!loan->kept)
        loan_give_back(loan);
}
