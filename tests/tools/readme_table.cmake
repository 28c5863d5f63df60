# README's table of options is the one the launcher prints, row for row.
execute_process(COMMAND ${LAUNCHER} options --markdown OUTPUT_VARIABLE table COMMAND_ERROR_IS_FATAL ANY)
file(READ ${README} readme)
string(FIND "${readme}" "${table}" at)
if(at EQUAL -1)
  message(FATAL_ERROR "README.md does not hold the table that `cushion options --markdown` prints:\n${table}")
endif()
