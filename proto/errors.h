/* Error codes of the wire. A code and its name never change meaning; new ones are appended.
 * docs/protocol.md, "Errors", says what they mean; docs/methods.md, when a method answers each. */
#ifndef UCM_PROTO_ERRORS_H
#define UCM_PROTO_ERRORS_H

/* X(NAME, code, sentence) */
#define UCM_ERRORS(X)                                                                              \
    X(INVALID, 1, "the request breaks the protocol or a bound")                                    \
    X(UNSUPPORTED, 2, "this version or feature is not supported")                                  \
    X(DENIED, 3, "the client may not do this")                                                     \
    X(NOT_FOUND, 4, "no such namespace, region, lease or request")                                 \
    X(BUSY, 5, "a bounded resource is used up; try again")                                         \
    X(DEADLINE, 6, "the deadline passed")                                                          \
    X(CANCELLED, 7, "the request was cancelled")                                                   \
    X(DEVICE, 8, "the device refused or failed")                                                   \
    X(IO, 9, "storage failed")                                                                     \
    X(NO_MEMORY, 10, "memory ran out")                                                             \
    X(SHUTDOWN, 11, "the daemon is shutting down")                                                 \
    X(INTERNAL, 12, "a bug in the daemon")                                                         \
    X(NO_METHOD, 13, "the daemon has no such method")

enum ucm_wire_error {
    UCM_WIRE_OK = 0,
#define X(name, code, sentence) UCM_WIRE_##name = code,
    UCM_ERRORS(X)
#undef X
};

/* An error for a peer: a stable code and a sentence that says what is wrong and what would be
 * right. code 0: none. */
struct ucm_error {
    int code; /* enum ucm_wire_error */
    char text[240];
};

/* Fills *e (may be NULL) and returns -code, so that "return ucm_error_set(e, ...)" reads well. */
int ucm_error_set(struct ucm_error *e, int code, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* "INVALID" for UCM_WIRE_INVALID; "UNKNOWN" for a code this build does not know. Static memory. */
const char *ucm_error_name(int code);
/* The sentence of the table; never NULL. */
const char *ucm_error_sentence(int code);

#endif
