#include "interpreter.h"

const Interpreter *py;

/* Say which interpreter calls, before it does. */
EXPORT void use_interpreter(const Interpreter *interpreter) { py = interpreter; }
