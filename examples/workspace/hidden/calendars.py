from calendars import day_of_year, is_leap

print([year for year in range(1896, 1905) if is_leap(year)], is_leap(2000), is_leap(2100))
print(day_of_year(1900, 3, 1), day_of_year(2024, 12, 31), day_of_year(2023, 1, 1))
