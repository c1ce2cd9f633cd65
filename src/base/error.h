/* error.h - one sentence for the user per thread.  A function that fails sets it and returns -errno. */
#ifndef TLY_ERROR_H
#define TLY_ERROR_H

enum { TLY_SENTENCE = 1024 };

/* Set the calling thread's sentence and return -err. */
int tly_fail(int err, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* The calling thread's sentence. */
const char *tly_error(void);

#endif
