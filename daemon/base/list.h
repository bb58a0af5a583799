/* Intrusive doubly linked list: a head is a node of its own, empty when it points to itself. */
#ifndef UCMD_BASE_LIST_H
#define UCMD_BASE_LIST_H

#include <stdbool.h>
#include <stddef.h>

struct list {
    struct list *prev, *next;
};

#define LIST_ENTRY(node, type, member) ((type *)((char *)(node)-offsetof(type, member)))

static inline void list_init(struct list *l)
{
    l->prev = l->next = l;
}

static inline bool list_empty(const struct list *l)
{
    return l->next == l;
}

static inline void list_push_back(struct list *head, struct list *node)
{
    node->prev = head->prev;
    node->next = head;
    head->prev->next = node;
    head->prev = node;
}

static inline void list_push_front(struct list *head, struct list *node)
{
    list_push_back(head->next, node);
}

/* Leaves the node pointing to itself, so that removing it twice is harmless. */
static inline void list_remove(struct list *node)
{
    node->prev->next = node->next;
    node->next->prev = node->prev;
    list_init(node);
}

static inline struct list *list_pop_front(struct list *head)
{
    struct list *node = head->next;

    if (node == head)
        return NULL;
    list_remove(node);
    return node;
}

/* Moves all nodes of `from`, in their order, to the front of `head`. */
static inline void list_splice_front(struct list *head, struct list *from)
{
    if (list_empty(from))
        return;
    from->prev->next = head->next;
    head->next->prev = from->prev;
    head->next = from->next;
    from->next->prev = head;
    list_init(from);
}

#endif
