/* `CallHooks.only` of calls.py for the usual call: plain tensors in and out, and no backward pass, transform or autocast
 * under way. Any other call is left to Python, before anything is recorded.
 *
 * It is compiled because hooks run between the network's kernels, which fill the caches: the interpreter's code and data
 * for a hook come from memory each time, and take several times as long as the hook does alone.
 */

#include "interpreter.h"

/* Calls with more inputs are left to Python. */
#define MOST_INPUTS 4
#define MOST_OWNED 64 /* more than one call makes */
#define ANY (-1)
#define NO_TASK (-1)

/* What `self` holds, in the order of `fastest_only` in calls.py. */
enum { ALIKE, HOOKS, PYTHON, OBSERVE, WATCH, ACQUIRE, RELEASE, COUNTS, BYPASS };

/* What is alike for all captures, in the order of `_ALIKE` in calls.py. */
enum {
    TENSOR, PARAMETER, MODULE_CALL, OBSERVATION, NEW,
    TASK, LEVEL, IS_CASTING, HAS_GRADIENTS, SET_GRADIENTS,
    ENTER, EXIT, OBSERVATIONS, IDENTITIES, KNOWN, NAMES, VERSION, REPLACED,
    NONE, TRUE, FALSE, EMPTY, PATHS
};

/* The arguments of the hook. */
enum { LAYER, OVERWRITES, MODULE, ARGS, KWARGS, OUTPUT, ARGUMENTS };

/* A call that has ended. */
typedef struct {
    Object *self, *layer, *module, *output;
    int overwrites;
    Object *known; /* `Identities._known` */
    Object *inputs[MOST_INPUTS];
    i64 versions[MOST_INPUTS], version; /* of the inputs, and of the output */
    i64 input_count;
    Object *owned[MOST_OWNED]; /* references to give back when all is recorded */
    i64 owned_count;
} Call;

#define PART(which) py->item(self, which)
#define SHARED(which) py->item(py->item(self, ALIKE), which)

static Object *own(Call *call, Object *made) {
    if (made) call->owned[call->owned_count++] = made;
    return made;
}

/* Return a tuple of objects that are held elsewhere; NULL if any of them is NULL. */
static Object *tuple_of(Call *call, Object *const *objects, i64 count) {
    for (i64 at = 0; at < count; at++)
        if (!objects[at]) return 0;
    Object *made = own(call, py->tuple(count));
    for (i64 at = 0; made && at < count; at++) {
        py->hold(objects[at]);
        py->set_item(made, at, objects[at]);
    }
    return made;
}

/* Return a named tuple of a class. */
static Object *named(Call *call, i64 class, Object *const *fields, i64 count) {
    Object *self = call->self;
    Object *given[] = {SHARED(class), tuple_of(call, fields, count)};
    return given[1] ? own(call, py->call(SHARED(NEW), given, 2, 0)) : 0;
}

/* Return a list that holds an object, or nothing if there is none. */
static Object *list_of(Call *call, Object *only) {
    Object *made = own(call, py->list(0));
    return made && only && py->append(made, only) ? 0 : made;
}

/* Call a function whatever happens: an error that is pending stays, one that it raises does not. */
static void always(Object *(*call)(Object *, Object *const *, i64, Object *), Object *function, Object *const *given,
                   i64 count) {
    Object *type, *value, *trace;
    py->take_error(&type, &value, &trace);
    py->drop(call(function, given, count, 0));
    py->put_error(type, value, trace);
}

/* Tell whether a function returns an object. */
static int returns(Object *self, i64 function, i64 object) {
    Object *returned = py->call(SHARED(function), 0, 0, 0);
    py->drop(returned); /* a singleton */
    if (!returned) py->clear();
    return returned == SHARED(object);
}

/* Return what a function without arguments returns, an integer; -1 on an error. */
static i64 integer_of(Object *self, i64 function) {
    Object *returned = py->call(SHARED(function), 0, 0, 0);
    i64 value = returned ? py->value(returned) : -1;
    py->drop(returned);
    return value;
}

static int is_plain(Object *self, Object *value) {
    Object *type = py->type(value);
    py->drop(type); /* its instance keeps it */
    return type == SHARED(TENSOR) || type == SHARED(PARAMETER);
}

/* Read the arguments; tell whether they are those of a usual call. */
static int is_usual(Call *call, Object *const *given, i64 count) {
    Object *self = call->self;
    if (count != ARGUMENTS || !is_plain(self, given[OUTPUT]) || py->dict_length(given[KWARGS])) return 0;
    call->input_count = py->length(given[ARGS]);
    int watches = PART(WATCH) != SHARED(NONE);
    if (call->input_count < 0) py->clear(); /* not a tuple */
    if (call->input_count < 1 || call->input_count > (watches ? 1 : MOST_INPUTS)) return 0;
    for (i64 at = 0; at < call->input_count; at++) {
        call->inputs[at] = py->item(given[ARGS], at);
        if (!is_plain(self, call->inputs[at])) return 0;
    }
    call->layer = given[LAYER];
    call->module = given[MODULE];
    call->output = given[OUTPUT];
    call->overwrites = given[OVERWRITES] == SHARED(TRUE);
    /* There is no task outside of backward passes, in which checkpointing recomputes. */
    return integer_of(self, TASK) == NO_TASK && returns(self, LEVEL, NONE) && returns(self, IS_CASTING, FALSE) &&
           (!watches || returns(self, HAS_GRADIENTS, TRUE));
}

/* Read a tensor's version; tell whether it has one. */
static int read_version(Object *self, Object *tensor, i64 *version) {
    Object *read = py->attribute(tensor, SHARED(VERSION));
    if (!read) {
        py->clear();
        return 0;
    }
    *version = py->value(read);
    py->drop(read);
    return 1;
}

static int read_versions(Call *call) {
    Object *self = call->self;
    for (i64 at = 0; at < call->input_count; at++)
        if (!read_version(self, call->inputs[at], call->versions + at)) return 0;
    return read_version(self, call->output, &call->version);
}

/* Return where a tensor at a version was shown, a list that is borrowed; NULL if it is not known. */
static Object *shown_at(const Call *call, Object *tensor, i64 version) {
    Object *key = py->identity(tensor);
    Object *entry = key ? py->lookup(call->known, key) : 0;
    py->drop(key);
    if (!entry) return 0;
    Object *there = py->call(py->item(entry, 0), 0, 0, 0);
    py->drop(there); /* the caller of the hook holds the tensor */
    if (there != tensor || (version != ANY && py->value(py->item(entry, 1)) != version)) return 0;
    return py->item(entry, 2);
}

/* As `Identities.sources`. */
static Object *sources_of(Call *call, Object *hooks) {
    Object *self = call->self;
    Object *found[MOST_INPUTS] = {0};
    if (PART(BYPASS) == SHARED(NONE)) return tuple_of(call, found, 0);
    Object *names = own(call, py->attribute(hooks, SHARED(NAMES)));
    for (i64 at = 0; names && at < call->input_count; at++) {
        Object *shown = shown_at(call, call->inputs[at], call->overwrites ? ANY : call->versions[at]);
        if (shown && py->list_length(shown) > 0) {
            found[at] = py->list_item(shown, 0);
        } else {
            Object *key = own(call, py->identity(call->inputs[at]));
            found[at] = key ? own(call, py->element(names, key)) : 0;
        }
        if (!found[at]) return 0;
    }
    return names ? tuple_of(call, found, call->input_count) : 0;
}

/* As `Identities.show`: return what the output repeats, NULL on an error, and set whether it is an unchanged input. */
static Object *show(Call *call, Object *place, int *passed_through) {
    Object *self = call->self;
    Object *shown = shown_at(call, call->output, call->version);
    *passed_through = 0;
    for (i64 at = 0; at < call->input_count && !call->overwrites; at++)
        if (call->inputs[at] == call->output ||
            (shown && shown_at(call, call->inputs[at], call->versions[at]) == shown))
            *passed_through = 1;
    if (!shown) {
        Object *entry[] = {own(call, py->reference(call->output, 0)), own(call, py->integer(call->version)),
                           list_of(call, place)};
        Object *known = tuple_of(call, entry, 3), *key = own(call, py->identity(call->output));
        if (!known || !key || py->store(call->known, key, known)) return 0;
    } else if (!py->list_length(shown)) {
        if (py->append(shown, place)) return 0;
    } else if (*passed_through) {
        Object *first = py->list_item(shown, 0);
        py->hold(first);
        return own(call, first);
    }
    return SHARED(NONE);
}

/* Return what the observer returns, called without gradients. */
static Object *observed(Call *call, Object *made) {
    Object *self = call->self;
    Object *given[] = {made, SHARED(EMPTY), call->output}, *off = SHARED(FALSE), *on = SHARED(TRUE);
    int has_gradients = returns(self, HAS_GRADIENTS, TRUE);
    if (has_gradients) always(py->call, SHARED(SET_GRADIENTS), &off, 1);
    Object *value = own(call, py->call(PART(OBSERVE), given, 3, 0));
    if (has_gradients) always(py->call, SHARED(SET_GRADIENTS), &on, 1);
    return value;
}

/* Return the number of the call, counted from 0. */
static Object *count(Call *call) {
    Object *self = call->self;
    Object *before = py->lookup(PART(COUNTS), call->layer);
    i64 number = before ? py->value(before) : 0;
    Object *next = own(call, py->integer(number + 1));
    return !next || py->store(PART(COUNTS), call->layer, next) ? 0 : own(call, py->integer(number));
}

/* Watch the gradient of the output; return its replacement, None to keep it. */
static Object *watched(Call *call, Object *made, Object *inputs) {
    Object *self = call->self;
    if (PART(WATCH) == SHARED(NONE)) return SHARED(NONE);
    Object *pair[] = {SHARED(EMPTY), call->output};
    Object *outputs = list_of(call, tuple_of(call, pair, 2));
    Object *given[] = {made, call->output, outputs, call->overwrites ? list_of(call, 0) : inputs};
    if (!outputs || !given[3]) return 0;
    Object *result = own(call, py->call(PART(WATCH), given, 4, 0));
    Object *replaced[] = {PART(HOOKS), outputs, result};
    if (result && result != SHARED(NONE) && !own(call, py->method(SHARED(REPLACED), replaced, 3, 0))) return 0;
    return result;
}

/* As `CallHooks._once`. */
static Object *record(Call *call, Object *observations) {
    Object *self = call->self;
    Object *number = count(call);
    Object *inputs = list_of(call, 0);
    for (i64 at = 0; inputs && at < call->input_count; at++) {
        Object *pair[] = {py->item(SHARED(PATHS), at), call->inputs[at]}, *given = tuple_of(call, pair, 2);
        if (!given || py->append(inputs, given)) return 0;
    }
    Object *sources = sources_of(call, PART(HOOKS));
    Object *called[] = {call->layer, call->module, number, inputs, SHARED(NONE)};
    Object *made = named(call, MODULE_CALL, called, 5);
    Object *where[] = {call->layer, number, SHARED(EMPTY)}, *place = tuple_of(call, where, 3);
    if (!sources || !made || !place) return 0;
    int passed_through;
    Object *repeats = show(call, place, &passed_through);
    Object *value = repeats ? observed(call, made) : 0;
    Object *seen[] = {call->layer,
                      number,
                      SHARED(EMPTY),
                      value,
                      SHARED(passed_through ? TRUE : FALSE),
                      SHARED(call->overwrites ? TRUE : FALSE),
                      repeats,
                      SHARED(NONE),
                      sources};
    Object *observation = named(call, OBSERVATION, seen, 9);
    if (!observation || py->append(observations, observation)) return 0;
    return watched(call, made, inputs);
}

/* The hook: a function of Python's, of the kind METH_FASTCALL. */
EXPORT Object *only(Object *self, Object *const *given, i64 count) {
    Call seen, *call = &seen;
    call->self = self;
    call->owned_count = 0;
    if (!is_usual(call, given, count)) return py->call(PART(PYTHON), given, count, 0);
    Object *taken = own(call, py->call(PART(ACQUIRE), 0, 0, 0)), *result = 0, *bypass = SHARED(NONE);
    if (taken && PART(BYPASS) != SHARED(NONE)) {
        bypass = own(call, py->call(PART(BYPASS), 0, 0, 0));
        if (bypass && !own(call, py->method(SHARED(ENTER), &bypass, 1, 0))) bypass = 0;
    }
    int is_left = 0;
    if (taken && bypass) {
        Object *identities = own(call, py->attribute(PART(HOOKS), SHARED(IDENTITIES)));
        Object *observations = own(call, py->attribute(PART(HOOKS), SHARED(OBSERVATIONS)));
        call->known = identities ? own(call, py->attribute(identities, SHARED(KNOWN))) : 0;
        if (call->known && observations) {
            is_left = !read_versions(call); /* inference tensors have none */
            result = is_left ? 0 : record(call, observations);
        }
        if (result) py->hold(result);
        Object *exit[] = {bypass, SHARED(NONE), SHARED(NONE), SHARED(NONE)};
        if (bypass != SHARED(NONE)) always(py->method, SHARED(EXIT), exit, 4);
    }
    if (taken) always(py->call, PART(RELEASE), 0, 0);
    while (call->owned_count) py->drop(call->owned[--call->owned_count]);
    return is_left ? py->call(PART(PYTHON), given, count, 0) : result;
}
