/* error.h - one sentence for the user per thread.  A function that fails sets it and returns -errno. */
#ifndef TLY_ERROR_H
#define TLY_ERROR_H

enum { TLY_SENTENCE = 1024 };

/* Set the calling thread's sentence and return -err. */
int tly_fail(int err, const char *format, ...) __attribute__((format(printf, 2, 3)));
#ifdef __clang_analyzer__ /* which looks into no other file, and would think that it may return 0 */
#define tly_fail(err, ...) (tly_fail(err, __VA_ARGS__), -(err))
#endif

/* The calling thread's sentence. */
const char *tly_error(void);

#endif
