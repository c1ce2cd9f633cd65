/* list.h - intrusive doubly linked list. */
#ifndef TLY_LIST_H
#define TLY_LIST_H

#include <stdbool.h>
#include <stddef.h>

struct tly_list {
    struct tly_list *prev, *next; /* of a head: last and first; of a node: its neighbours */
};

#define TLY_LIST_INIT(head) \
    { \
        .prev = &(head), .next = &(head) \
    }
#define tly_list_entry(node, type, member) ((type *)((char *)(node)-offsetof(type, member)))

static inline void tly_list_init(struct tly_list *l)
{
    l->prev = l->next = l;
}
static inline bool tly_list_empty(const struct tly_list *l)
{
    return l->next == l;
}
static inline void tly_list_append(struct tly_list *head, struct tly_list *node)
{
    node->prev = head->prev;
    node->next = head;
    head->prev->next = node;
    head->prev = node;
}
/* Also harmless on a node that is in no list, if it was initialised. */
static inline void tly_list_remove(struct tly_list *node)
{
    node->prev->next = node->next;
    node->next->prev = node->prev;
    tly_list_init(node);
}
/* Remove the first node of a list that is not empty.  By way of the head, so that who reads (clang's analyzer does) sees
 * that the head has another first one then. */
static inline struct tly_list *tly_list_take(struct tly_list *head)
{
    struct tly_list *node = head->next;
    head->next = node->next;
    head->next->prev = head;
    tly_list_init(node);
    return node;
}

#endif
