"""The function that XLA calls, in LLVM's language: it does an operation's items on all threads of XLA's pool.

An operation NAME supplies `i64 NAME.count(ptr frame, i64 threads)`, how many items a call has for so many threads, and
`void NAME.item(ptr frame, i64 i, i64 items)`, which does one; the items of a call write to different places, in any
order. Offsets are those of the structs in `xla/ffi/api/c_api.h` of jaxlib (version 0.3 of that interface, which later
ones extend at the ends of structs).

A call's job is on the heap and is counted: a task that the pool starts late finds nothing left to do, and the call does
not wait for it. A call waits only for items that a thread has begun.

A call that takes one thread gives the pool a task that does nothing. XLA's pool lets a thread that finds no task sleep
after some 30 microseconds, less than lies between two products of a decode step, and to wake it takes the caller 8 and
the thread 20, in which it would have read half a megabyte of weights. It slept 25 times in a step of one request.
"""

from __future__ import annotations

API_VERSION = (0, 3)

# Of XLA_FFI_CallFrame, XLA_FFI_Args and XLA_FFI_Rets within it, and XLA_FFI_Buffer.
FRAME_ARGS, FRAME_RETS = 72, 112
BUFFER_DATA, BUFFER_DIMS = 24, 40

# A job: [next item, items done, references, items, frame].
_TEMPLATE = r"""
declare ptr @malloc(i64)
declare void @free(ptr)
declare i32 @sched_yield()
declare i64 @llvm.smin.i64(i64, i64)
declare i64 @llvm.smax.i64(i64, i64)
declare i64 @NAME.count(ptr, i64)
declare void @NAME.item(ptr, i64, i64)

define internal void @NAME.drop(ptr %job) {
  %references = getelementptr i64, ptr %job, i64 2
  %before = atomicrmw sub ptr %references, i64 1 acq_rel
  %last = icmp eq i64 %before, 1
  br i1 %last, label %free, label %end
free:
  call void @free(ptr %job)
  br label %end
end:
  ret void
}

define internal void @NAME.work(ptr %job) {
entry:
  %p.done = getelementptr i64, ptr %job, i64 1
  %p.items = getelementptr i64, ptr %job, i64 3
  %items = load i64, ptr %p.items
  %p.frame = getelementptr i64, ptr %job, i64 4
  %frame = load ptr, ptr %p.frame
  br label %next
next:
  %i = atomicrmw add ptr %job, i64 1 monotonic
  %more = icmp slt i64 %i, %items
  br i1 %more, label %do, label %end
do:
  call void @NAME.item(ptr %frame, i64 %i, i64 %items)
  %before = atomicrmw add ptr %p.done, i64 1 release
  br label %next
end:
  ret void
}

; a task that keeps a thread awake
define internal void @NAME.nothing(ptr %unused) {
  ret void
}

define internal void @NAME.task(ptr %job) {
  call void @NAME.work(ptr %job)
  call void @NAME.drop(ptr %job)
  ret void
}

; whether there was an error, which is destroyed: the call then works by itself
define internal i1 @NAME.failed(ptr %api, ptr %error) {
  %is = icmp ne ptr %error, null
  br i1 %is, label %destroy, label %end
destroy:
  %arg = alloca [3 x ptr]
  %size = getelementptr ptr, ptr %arg, i64 0
  store i64 24, ptr %size
  %extension = getelementptr ptr, ptr %arg, i64 1
  store ptr null, ptr %extension
  %p.error = getelementptr ptr, ptr %arg, i64 2
  store ptr %error, ptr %p.error
  %p.destroy = getelementptr i8, ptr %api, i64 64
  %f = load ptr, ptr %p.destroy
  call void %f(ptr %arg)
  br label %end
end:
  ret i1 %is
}

define ptr @NAME(ptr %frame) {
entry:
  %p.extension = getelementptr i8, ptr %frame, i64 8
  %extension = load ptr, ptr %p.extension
  %asked = icmp ne ptr %extension, null
  br i1 %asked, label %metadata, label %run

metadata: ; the only extension there is asks which version of the interface this is written for
  %p.metadata = getelementptr i8, ptr %extension, i64 24
  %answer = load ptr, ptr %p.metadata
  %major = getelementptr i8, ptr %answer, i64 24
  store i32 MAJOR, ptr %major
  %minor = getelementptr i8, ptr %answer, i64 28
  store i32 MINOR, ptr %minor
  %traits = getelementptr i8, ptr %answer, i64 32
  store i32 0, ptr %traits
  ret ptr null

run:
  %p.api = getelementptr i8, ptr %frame, i64 16
  %api = load ptr, ptr %p.api
  %p.context = getelementptr i8, ptr %frame, i64 24
  %context = load ptr, ptr %p.context
  %p.threads = alloca i64
  store i64 1, ptr %p.threads
  ; [size, extension, context, where to put the number] and [size, extension, context, task, job]
  %arg = alloca [5 x i64]
  store i64 32, ptr %arg
  %arg.1 = getelementptr i64, ptr %arg, i64 1
  store ptr null, ptr %arg.1
  %arg.2 = getelementptr i64, ptr %arg, i64 2
  store ptr %context, ptr %arg.2
  %arg.3 = getelementptr i64, ptr %arg, i64 3
  store ptr %p.threads, ptr %arg.3
  %p.num_threads = getelementptr i8, ptr %api, i64 144
  %num_threads = load ptr, ptr %p.num_threads
  %no.number = call ptr %num_threads(ptr %arg)
  %no.pool = call i1 @NAME.failed(ptr %api, ptr %no.number)
  %threads = load i64, ptr %p.threads
  %items = call i64 @NAME.count(ptr %frame, i64 %threads)
  %others = sub i64 %threads, 1
  %rest = sub i64 %items, 1
  %few = call i64 @llvm.smin.i64(i64 %others, i64 %rest)
  %tasks = call i64 @llvm.smax.i64(i64 %few, i64 0)
  store i64 40, ptr %arg
  %p.schedule = getelementptr i8, ptr %api, i64 136
  %schedule = load ptr, ptr %p.schedule
  %alone = icmp eq i64 %tasks, 0
  %p.job = getelementptr i64, ptr %arg, i64 4
  %has.pool = icmp sgt i64 %others, 0
  %stir = and i1 %alone, %has.pool
  br i1 %stir, label %stirring, label %begin
stirring:
  store ptr @NAME.nothing, ptr %arg.3
  store ptr null, ptr %p.job
  %not.stirred = call ptr %schedule(ptr %arg)
  %ignored.refusal = call i1 @NAME.failed(ptr %api, ptr %not.stirred)
  br label %begin
begin:
  %job = call ptr @malloc(i64 40)
  store i64 0, ptr %job
  %p.done = getelementptr i64, ptr %job, i64 1
  store i64 0, ptr %p.done
  %p.references = getelementptr i64, ptr %job, i64 2
  %references = add i64 %tasks, 1
  store i64 %references, ptr %p.references
  %p.items = getelementptr i64, ptr %job, i64 3
  store i64 %items, ptr %p.items
  %p.frame = getelementptr i64, ptr %job, i64 4
  store ptr %frame, ptr %p.frame
  store ptr @NAME.task, ptr %arg.3
  store ptr %job, ptr %p.job
  br label %spawn
spawn:
  %t = phi i64 [ 0, %begin ], [ %t.next, %spawned ], [ %t.next, %refused ]
  %spawn.more = icmp slt i64 %t, %tasks
  br i1 %spawn.more, label %spawn.one, label %work
spawn.one:
  %t.next = add i64 %t, 1
  %no.task = call ptr %schedule(ptr %arg)
  %refusal = call i1 @NAME.failed(ptr %api, ptr %no.task)
  br i1 %refusal, label %refused, label %spawned
refused:
  call void @NAME.drop(ptr %job)
  br label %spawn
spawned:
  br label %spawn
work:
  call void @NAME.work(ptr %job)
  br label %look
look:
  %looks = phi i64 [ 0, %work ], [ %looks.next, %wait ], [ %looks.next, %yield ]
  %done = load atomic i64, ptr %p.done acquire, align 8
  %waiting = icmp slt i64 %done, %items
  br i1 %waiting, label %wait, label %end
wait:
  %looks.next = add i64 %looks, 1
  %long = icmp sgt i64 %looks, 4096
  br i1 %long, label %yield, label %look
yield: ; the other thread may be waiting for this core
  %ignored = call i32 @sched_yield()
  br label %look
end:
  call void @NAME.drop(ptr %job)
  ret ptr null
}
"""


def handler(name: str) -> str:
    """The text of the handler of operation `name`."""
    text = _TEMPLATE.replace("NAME", name)
    return text.replace("MAJOR", str(API_VERSION[0])).replace("MINOR", str(API_VERSION[1]))
