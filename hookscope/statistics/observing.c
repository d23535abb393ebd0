/* `Reducer.reduce`, `Recorder.observe` and `GradientRecorder.observe` for the usual tensor, one that native.c reads, where neither distributions nor
 * sketches are asked for. Any other tensor is left to Python. Why it is compiled: see calls.c.
 */

#include "../hooks/interpreter.h"
#include "native.h"

/* What `self` holds for `reduce`, in the order of `FusedReducer.parts`. LATEST is a list of one item, NONE or
 * the tuple (weak reference, version, channel axis, reduction) of the tensor that was reduced last. KERNEL is the address of
 * the function of native.c, RESULTS that of its last argument. */
enum { ALIKE, PYTHON, LATEST, THREADS, KERNEL, RESULTS };

/* What `self` holds for `observe` and `observe_gradient`, in the order of `Reducer.observer`. OF_REDUCE is the `self` of `reduce`. */
enum { OF_REDUCE = PYTHON + 1, RECORDER };

/* What is alike for both, and first in `self`, in the order of `ALIKE` in native.py. */
enum {
    TENSOR, PARAMETER, FLOAT32, LAYOUT_OF, REDUCTION, NEW, FROM_BYTES,
    VERSION, DTYPE, IS_CPU, IS_NESTED, IS_NEG, DATA_PTR, SHAPE, STRIDE, KNOWN, ALL_NONZERO, ADDRESS, AXES, CHANNEL_AXIS,
    NODES, LAYER, CALL, SLOT, ROLE, OUTPUT, CURRENT_NODE, HABITS, AXIS_BY_SHAPE, SECOND, LAST, ITS_ATTRIBUTES, DIMS, EMPTY,
    NONE, TRUE, FALSE, ZERO
};

/* The items of `Reduction`, and of `ModuleCall`, that are used here. */
enum { REDUCTION_ITEMS = 17, MODULE = 1, OPERATION = 4 };

typedef i32 (*Kernel)(const float *, const Layout *, const Results *);

#define PART(which) py->item(self, which)
#define SHARED(which) py->item(py->item(self, ALIKE), which)

static Object *held(Object *object) {
    if (object) py->hold(object);
    return object;
}

/* Return an attribute, or what a method returns, as an integer; -1, with no error, if it is none. */
static i64 integer_of(Object *object) {
    i64 value = object ? py->value(object) : -1;
    if (value == -1) py->clear();
    py->drop(object);
    return value;
}

static Object *attribute(Object *self, Object *tensor, i64 name) { return py->attribute(tensor, SHARED(name)); }

static Object *method(Object *self, Object *tensor, i64 name) { return py->method(SHARED(name), &tensor, 1, 0); }

static int is_plain(Object *self, Object *tensor) {
    Object *type = py->type(tensor);
    return (is(type, SHARED(TENSOR)) || type == SHARED(PARAMETER)) &&
           is(attribute(self, tensor, IS_NESTED), SHARED(FALSE));
}

/* Return what the kernel needs to know of the tensor's shape; NULL if it cannot read the tensor, perhaps with an error. */
static Object *layout_of(Object *self, Object *tensor, Object *axis) {
    if (!is(attribute(self, tensor, DTYPE), SHARED(FLOAT32)) || !is(attribute(self, tensor, IS_CPU), SHARED(TRUE)) ||
        !is(method(self, tensor, IS_NEG), SHARED(FALSE)))
        return 0;
    Object *shape = attribute(self, tensor, SHAPE), *strides = method(self, tensor, STRIDE), *layout = 0;
    Object *given[] = {shape, strides, axis, PART(THREADS)};
    if (shape && strides) layout = py->call(SHARED(LAYOUT_OF), given, 4, 0);
    py->drop(shape);
    py->drop(strides);
    if (layout != SHARED(NONE)) return layout;
    py->drop(layout);
    return 0;
}

/* Return the reduction that the kernel's results make; NULL with an error. */
static Object *reduction_of(Object *self, Object *layout, i32 outcome, const Layout *sizes, const Results *results) {
    Object *items[REDUCTION_ITEMS], *known = attribute(self, layout, KNOWN);
    Object *nonzero = attribute(self, layout, ALL_NONZERO);
    if (outcome & WITH_ZEROS && nonzero != SHARED(NONE)) {
        Object *bytes = py->bytes((const char *)results->nonzero, 8 * sizes->channels);
        py->drop(nonzero);
        nonzero = bytes ? py->call(SHARED(FROM_BYTES), &bytes, 1, 0) : 0;
        py->drop(bytes);
    }
    i64 at = 0;
    for (; at < 4; at++) items[at] = known ? held(py->item(known, at)) : 0; /* shape, dtype, elements, channel axis */
    items[at++] = known ? held(py->item(known, 2)) : 0;                      /* all are finite */
    for (i64 each = 0; each < FOUND - 1; each++) items[at++] = py->real(results->found[each]);
    items[at++] = held(SHARED(ZERO)); /* NaN */
    items[at++] = py->integer((i64)results->found[FOUND - 1]);
    items[at++] = nonzero;
    while (at < REDUCTION_ITEMS) items[at++] = held(SHARED(NONE));
    py->drop(known);
    int is_whole = 1;
    for (at = 0; at < REDUCTION_ITEMS; at++) is_whole &= items[at] != 0;
    Object *given[] = {SHARED(REDUCTION), is_whole ? py->tuple(REDUCTION_ITEMS) : 0}, *made = 0;
    for (at = 0; at < REDUCTION_ITEMS; at++) {
        if (given[1])
            py->set_item(given[1], at, items[at]);
        else
            py->drop(items[at]);
    }
    if (given[1]) made = py->call(SHARED(NEW), given, 2, 0);
    py->drop(given[1]);
    return made;
}

/* Return the reduction of the tensor that came last, if this is it, unmodified. */
static Object *latest(Object *self, Object *tensor, i64 version, Object *axis) {
    Object *entry = py->list_item(PART(LATEST), 0);
    if (entry == SHARED(NONE) || py->item(entry, 2) != axis || py->value(py->item(entry, 1)) != version) return 0;
    return is(py->call(py->item(entry, 0), 0, 0, 0), tensor) ? held(py->item(entry, 3)) : 0;
}

static void remember(Object *self, Object *tensor, i64 version, Object *axis, Object *reduction) {
    Object *items[] = {py->reference(tensor, 0), py->integer(version), held(axis), held(reduction)};
    Object *entry = items[0] && items[1] ? py->tuple(4) : 0;
    for (i64 at = 0; at < 4; at++) {
        if (entry)
            py->set_item(entry, at, items[at]);
        else
            py->drop(items[at]);
    }
    if (entry)
        py->set_list_item(PART(LATEST), 0, entry);
    else
        py->clear();
}

/* Return a plain tensor's reduction; NULL, perhaps with an error, if it is for Python to reduce. */
static Object *reduced(Object *self, Object *tensor, Object *axis) {
    i64 version = integer_of(attribute(self, tensor, VERSION)); /* inference tensors have none */
    if (version < 0) return 0;
    Object *reduction = latest(self, tensor, version, axis);
    if (reduction) return reduction;
    Object *layout = layout_of(self, tensor, axis);
    if (!layout) return 0;
    const float *values = (const float *)integer_of(method(self, tensor, DATA_PTR));
    const Layout *sizes = (const Layout *)integer_of(attribute(self, layout, ADDRESS));
    const Results *results = (const Results *)py->value(PART(RESULTS));
    Kernel kernel = (Kernel)py->value(PART(KERNEL));
    if ((i64)values > 0 && (i64)sizes > 0 && sizes->channels <= results->most_channels) {
        i32 outcome = kernel(values, sizes, results);
        if (!(outcome & (RARE | CANCELLED))) reduction = reduction_of(self, layout, outcome, sizes, results);
    }
    if (reduction) remember(self, tensor, version, axis, reduction);
    py->drop(layout);
    return reduction;
}

/* `Reducer.reduce`: a function of Python's, of the kind METH_FASTCALL. */
EXPORT Object *reduce(Object *self, Object *const *given, i64 count) {
    Object *axis = count > 1 ? given[1] : SHARED(NONE), *reduction = 0;
    if (count && is_plain(self, given[0])) reduction = reduced(self, given[0], axis);
    if (reduction) return reduction;
    py->clear();
    return py->call(PART(PYTHON), given, count, 0);
}

/* As `_matching` in channel_axis.py; 0 where Python must decide. Drops `count`, which may be NULL. */
static i64 matching_axis(Object *count, Object *shape, i64 last, int is_second) {
    i64 channels = count ? py->value(count) : -1;
    if (channels < 0) {
        py->clear();
        channels = count && py->length(count) == 1 ? py->value(py->item(count, 0)) : -1;
    }
    py->drop(count);
    if (channels < 0) return 0;
    int second_fits = py->value(py->item(shape, 1)) == channels, last_fits = py->value(py->item(shape, last)) == channels;
    return (second_fits != last_fits ? second_fits : is_second) ? 1 : last;
}

/* `AxisReader.channel_axis` where it changes nothing that is remembered: the axis is the one known for this shape, or there
 * is none. Else NULL, perhaps with an error. What is returned is borrowed. */
static Object *known_axis(Object *self, Object *axes, Object *maker, Object *kind, Object *shape) {
    Owned owned;
    owned.count = 0;
    i64 last = py->length(shape) - 1, axis = 0;
    if (last < 1) return SHARED(NONE);
    Object *habits = own(&owned, py->attribute(axes, SHARED(HABITS)));
    Object *by_shape = own(&owned, py->attribute(axes, SHARED(AXIS_BY_SHAPE)));
    Object *habit = habits ? py->lookup(habits, kind) : 0;
    Object *beyond_batch = own(&owned, py->tuple(last));
    for (i64 at = 0; beyond_batch && at < last; at++) py->set_item(beyond_batch, at, held(py->item(shape, at + 1)));
    Object *known = habit && by_shape && beyond_batch ? py->lookup(by_shape, beyond_batch) : 0;
    if (known) {
        Object *count = py->item(habit, 0), *side = py->item(habit, 1);
        if (count != SHARED(EMPTY)) {
            axis = matching_axis(py->attribute(maker, count), shape, last, side == SHARED(SECOND));
        } else if (side == SHARED(EMPTY)) {
            Object *attributes = maker == kind ? 0 : own(&owned, py->attribute(maker, SHARED(ITS_ATTRIBUTES)));
            if (maker == kind || (attributes && !py->lookup(attributes, SHARED(DIMS)))) axis = py->value(known);
        } else {
            axis = side == SHARED(LAST) ? last : side == SHARED(SECOND);
        }
    }
    int is_known = axis && axis == py->value(known);
    give_back(&owned);
    return is_known ? known : 0;
}

/* `Recorder.observe`: given the call, the slot and the tensor. */
EXPORT Object *observe(Object *self, Object *const *given, i64 count) {
    if (count != 3 || !is_plain(self, given[2])) {
        py->clear();
        return py->call(PART(PYTHON), given, count, 0);
    }
    Object *axes = py->attribute(PART(RECORDER), SHARED(AXES)), *shape = attribute(self, given[2], SHAPE);
    Object *operation = py->item(given[0], OPERATION), *maker = py->item(given[0], MODULE), *kind;
    if (operation == SHARED(NONE)) {
        kind = py->type(maker);
    } else {
        maker = py->item(operation, 0);
        kind = held(maker);
    }
    Object *axis = axes && shape ? held(known_axis(self, axes, maker, kind, shape)) : 0;
    if (!axis && axes && shape) {
        Object *asked[] = {axes, maker, shape};
        py->clear();
        axis = py->method(SHARED(CHANNEL_AXIS), asked, 3, 0);
    }
    Object *reduction = axis ? reduced(PART(OF_REDUCE), given[2], axis) : 0;
    py->drop(axes);
    py->drop(shape);
    py->drop(kind);
    if (!axis) return 0;
    py->drop(axis);
    if (reduction) return reduction;
    py->clear();
    return py->call(PART(PYTHON), given, count, 0);
}

/* `GradientRecorder.observe`: given the site and the gradient. */
EXPORT Object *observe_gradient(Object *self, Object *const *given, i64 count) {
    Owned owned;
    owned.count = 0;
    Object *reduction = 0, *recorder = PART(RECORDER);
    if (count == 2 && is_plain(self, given[1]) && is(attribute(self, given[0], ROLE), SHARED(OUTPUT))) {
        Object *key[] = {own(&owned, attribute(self, given[0], LAYER)), own(&owned, attribute(self, given[0], CALL)),
                         own(&owned, attribute(self, given[0], SLOT)), SHARED(OUTPUT)};
        Object *place = tuple_of(&owned, key, 3), *site = tuple_of(&owned, key, 4);
        Object *axes = own(&owned, py->attribute(recorder, SHARED(AXES)));
        Object *nodes = own(&owned, py->attribute(recorder, SHARED(NODES)));
        Object *node = own(&owned, py->call(SHARED(CURRENT_NODE), 0, 0, 0));
        if (place && site && axes && nodes && node && !py->store(nodes, site, node)) {
            Object *axis = py->lookup(axes, place);
            reduction = reduced(PART(OF_REDUCE), given[1], axis ? axis : SHARED(NONE));
        }
    }
    give_back(&owned);
    if (reduction) return reduction;
    py->clear();
    return py->call(PART(PYTHON), given, count, 0);
}
