/* fork.h - what a forked child must not keep: our descriptors.  With one alive in a child, the peer of a
 * killed rank would see no end of the connection, and its port would stay in use. */
#ifndef TLY_FORK_H
#define TLY_FORK_H

/* Note a descriptor, so that a forked child closes it.  Returns fd. */
int tly_fd_own(int fd);
/* It is no longer ours: somebody else is about to close it. */
void tly_fd_disown(int fd);
/* Close it.  Negative is accepted. */
void tly_fd_close(int fd);

/* Counts the forks between the process that loaded the library and this one.  What was opened under another
 * number belongs to a parent. */
unsigned tly_fork_generation(void);

#endif
