from fields import split_line

print(split_line('a,"b,c",d'), split_line('"say ""hi""",2'), split_line(""), split_line("a,,"))
