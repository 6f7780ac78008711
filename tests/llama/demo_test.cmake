# The README's first command without its questions: the shipped document and continuation with every default.
# cmake -DPROGRAM=... -DMODEL=... -DWORK=... -P demo_test.cmake

file(MAKE_DIRECTORY ${WORK})
execute_process(COMMAND ${PROGRAM} --quiet --model ${MODEL} --skip-answers --json ${WORK}/out.json RESULT_VARIABLE code OUTPUT_VARIABLE out ERROR_VARIABLE err)
if(NOT code EQUAL 0)
    message(FATAL_ERROR "Exit code ${code}\n${err}\n${out}")
endif()
file(READ ${WORK}/out.json json)
string(JSON kl GET "${json}" continuation kl)
string(JSON sealed GET "${json}" sealed_tokens)
if(sealed LESS 6000 OR NOT kl LESS 0.005)
    message(FATAL_ERROR "${sealed} tokens sealed, KL ${kl} on the continuation, where at most 0.005 is promised\n${out}")
endif()
