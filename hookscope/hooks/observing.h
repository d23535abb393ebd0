#include "interpreter.h"

/* Return what `Recorder.observe` does for the only tensor that a call of a module has returned, at its version; NULL, with no
 * error, if that is left to Python. `parts` are those of `observe` in observing.c. */
HIDDEN Object *observe_output(Object *parts, Object *module, Object *output, i64 version);
