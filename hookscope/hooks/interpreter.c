#include "interpreter.h"

const Interpreter *py;

/* Say which interpreter calls, before it does. */
EXPORT void use_interpreter(const Interpreter *interpreter) { py = interpreter; }

/* By which the caller can tell whether the library is of its own version. */
EXPORT const i64 entry_count = sizeof(Interpreter) / sizeof(void *);
